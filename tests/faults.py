"""Faults seeded by hand, one at a time, each of which the tests must catch.

    python -m tests.faults             every fault; prints who caught it and fails on a survivor
    python -m tests.faults --only 7    one of them
    python -m tests.faults --locate    finds the smallest test of those that have none yet and writes smallest.json

A fault is a file, the text to find in it (exactly once) and what to put there instead, in a copy of the
sources. The shared suite catches most (a crash counts: guard pages work by crashing); a fault that lives
elsewhere names its test. `smallest.json` holds what catches each of them alone, so that all of them can be
tried in every run.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.breaking import Server

SUITE = "suite"
SMALLEST = Path(__file__).parent / "smallest.json"
SWEEPS = (
    ("exact", 60, "1"),
    ("edges", 150, "1"),
    ("real", 60, "1"),
    ("special", 80, "1"),
    ("half", 60, "1"),
    ("half-edges", 60, "1"),
    ("half-special", 60, "1"),
    ("real", 40, "1,2,3"),
)


@dataclass(frozen=True)
class Fault:
    """What is broken, in words and in text; `caught_by` is the suite, a test file or one test of it."""

    file: str
    find: str
    put: str
    why: str
    caught_by: str = SUITE


ROWS, TILES, SUMS = "codegen/cpu/rows.py", "codegen/cpu/tiles.py", "codegen/cpu/sums.py"
EPILOGUE, EMIT, STRIDEPACK = "codegen/cpu/epilogue.py", "codegen/cpu/emit.py", "methods/stridepack/cpu.py"
AMX, BANDS, LISTS, BLOCKS, TILED = (
    "codegen/cpu/amx.py",
    "codegen/cpu/bands.py",
    "codegen/cpu/lists.py",
    "codegen/cpu/blocks.py",
    "formats/tiled.py",
)
DIRECT, FLAT, LAYOUT, REFERENCE = "methods/direct/cpu.py", "formats/flat.py", "ir/layout.py", "reference.py"

METHOD = {
    TILES: "stridepack",
    STRIDEPACK: "stridepack",
    BLOCKS: "tilewise",
    TILED: "tilewise",
    LISTS: "actsparse",
}
METHOD["methods/actsparse/cpu.py"] = "actsparse"
SAME, RUNS = "tests/test_same_answers.py::", "tests/test_whatever_runs.py::"
IDLE = (("idle-special", 60, "1"), ("idle", 60, "1"))

FAULTS = (
    Fault(SUMS, "rest, many = e.loop(first, last, several, acc + [self.nothing] * (len(acc) * (chains - 1)), UNROLL)", "rest, many = first, acc * chains", "the unrolled part is left out, but its remainder runs it all", "tests/test_llvm.py::test_avx512_uses_whole_registers"),
    Fault(SUMS, "total = e.loop(rest, last, one, many[: len(acc)])[1]", "total = many[: len(acc)]", "the last few nonzeros of a row are dropped"),
    Fault(SUMS, "sums[own] = one(b.add(at, I64(i)), sums[own])", "sums[own] = one(b.add(at, I64(0)), sums[own])", "the unrolled loop reads one nonzero four times"),
    Fault(SUMS, "for chain in range(1, chains):", "for chain in range(2, chains):", "one of several chains is left out"),
    Fault(SUMS, "e.vector(e.at(window, I64(step))", "e.vector(e.at(window, I64(0 * step))", "every vector reads the first one's pixels"),
    Fault(SUMS, "return e.choose(opening, fresh, resumed)", "return fresh()", "partial sums of earlier channels are lost"),
    Fault(ROWS, "e.choose(closing, finish, keep)", "finish()", "the epilogue is applied after every block of channels"),
    Fault(ROWS, "so_far = e.at(scratch, b.mul(b.sub(k, low)", "so_far = e.at(scratch, b.mul(b.sub(k, k)", "filters share one slot of partial sums"),
    Fault(ROWS, 'scratch = self.e.at(a["scratch"], b.mul(thread, a["scratch_thread"]))', 'scratch = a["scratch"]', "threads share one scratch", "tests/test_workers.py::test_a_thread_writes_no_other_threads_scratch"),
    Fault(SUMS, "return b.select(live, v, ir.Constant(v.type, None))", "return v", "rubbish lanes stay in the border"),
    Fault(ROWS, "e.choose(whole, everything, some)", "everything()", "the last block stores past its plane"),
    Fault(ROWS, "self.e.when(final, lambda: self.border(image, group))", "pass", "the border is never written"),
    Fault(ROWS, "e.when(opening, lambda: self._front(zero))", "pass", "the front of the buffer is never written"),
    Fault(EMIT, "last = b.sdiv(b.mul(units, b.add(thread, I64(1))), threads)", "last = b.sdiv(b.mul(units, thread), threads)", "a thread's share is empty"),
    Fault(ROWS, 'image = b.sdiv(u, per_image)', 'image = I64(0)', "every image is the first"),
    Fault(SUMS, 'if step == "add":', 'if step == "sum":', "the residual is taken for an activation"),
    Fault(ROWS, "sums = self.row(k, opening", "sums = self.row(j, opening", "bias of the row's place, not of its filter"),
    Fault(EPILOGUE, 'return e.b.select(e.b.fcmp_ordered("<", v, low), low, v)  #', 'return e.b.select(e.b.fcmp_ordered(">", v, low), v, low)  #', "ReLU swallows NaN"),
    Fault(EPILOGUE, "constant(lanes, 3.0)), zero)", "constant(lanes, 2.0)), zero)", "Hardswish is shifted"),
    Fault(EPILOGUE, "_at_least(e, v, zero), constant(lanes, 6.0))", "_at_least(e, v, zero), constant(lanes, 7.0))", "ReLU6 is ReLU7"),
    Fault(EPILOGUE, "_LN2_LOW = 1.42860682030941723e-6", "_LN2_LOW = 1.3e-6", "the exponential is a little off", "tests/test_epilogue.py::test_activations_to_the_last_bits"),
    Fault(EPILOGUE, "b.fmul(x, constant(lanes, 0.0)), below", "below, below", "SiLU of very negative numbers does not vanish"),
    Fault(EPILOGUE, 'b.select(b.fcmp_ordered(">", v, zero), v, b.fmul(v, parameter))', 'b.select(b.fcmp_ordered("<", v, zero), v, b.fmul(v, parameter))', "LeakyReLU leaks upwards"),
    Fault(EMIT, "_fill(I32, lanes, 0x7FFF)", "_fill(I32, lanes, 0x8000)", "bf16 ties round away from even", "tests/test_epilogue.py::test_stores_round_to_nearest_even"),
    Fault(EMIT, "kept = self.b.select(self.b.fcmp_unordered(\"uno\", value, value), quiet, rounded)", "kept = self.b.lshr(bits, _fill(I32, lanes, 1))", "bf16 is stored shifted"),
    Fault(FLAT, "row, column = i * conv.dilation[0] - top, j * conv.dilation[1] - left", "row, column = i - top, j - left", "dilation is forgotten"),
    Fault(FLAT, "row, column = i * conv.dilation[0] - top, j * conv.dilation[1] - left", "row, column = i * conv.dilation[1] - top, j * conv.dilation[0] - left", "dilation's two numbers are swapped"),
    Fault(FLAT, "row // u * reads.pitch + column // v)", "row // u * reads.pitch + column // u)", "the column's stride is taken for the row's"),
    Fault(FLAT, "group = a[\"row\"].astype(np.int64) // (conv.k // conv.groups)", "group = a[\"row\"].astype(np.int64) * 0", "groups all read the first group's channels"),
    Fault(FLAT, "live = (number < pixels) & (number % writes.pitch < q)", "live = number < pixels", "the gap between rows is taken for pixels"),
    Fault(FLAT, "blocks = ceil_div(live_vectors, code.vectors)", "blocks = max(1, live_vectors // code.vectors)", "the last block is left out"),
    Fault(DIRECT, " widest * code.vectors * code.lanes * 4 if", " (widest - 1) * code.vectors * code.lanes * 4 if", "scratch is one filter short"),
    Fault(FLAT, "return max(0, int(every.max()) + reach - conv.c * reads.plane(*conv.size)),", "return max(0, int(every.max()) + reach - conv.c * reads.plane(*conv.size) - 16),", "x's slack is a vector short"),
    Fault(FLAT, "nonzeros = by_rank(rank[pair])", "nonzeros = np.arange(len(filters))", "nonzeros are not sorted into their rows"),
    Fault(FLAT, "else work, groups)", "else work, groups)[:-1]", "the last group of filters is lost"),
    Fault(FLAT, "or a[\"position\"].max() >= c * r * s", "or a[\"position\"].max() > c * r * s", "a position one past the filter is let in", "tests/test_direct.py::test_every_damaged_array_is_found"),
    Fault(FLAT, "or (np.diff(start) < 0).any()", "or False", "row starts that go back are let in", "tests/test_direct.py::test_every_damaged_array_is_found"),
    Fault(FLAT, "reads.slack < x_slack or", "", "a layout without slack is let in", "tests/test_direct.py::test_layouts_that_would_read_outside_are_refused"),
    Fault(FLAT, "every = every + -every % lanes", "every = every - every % lanes", "x's slack forgets that a run reads whole vectors", "tests/test_direct.py::test_slack_covers_what_the_last_run_reads"),
    Fault(FLAT, "(offset - offset % lanes)[order]", "offset[order]", "windows of a run are moved twice"),
    Fault(FLAT, "value[order],", "value,", "values are not sorted into their runs"),
    Fault(ROWS, "list(range(shift, shift + self.lanes))", "list(range(shift - 1, shift - 1 + self.lanes))", "a run's sums are moved one lane short"),
    Fault(ROWS, "[self.nothing] * (len(acc) + 1)", "[self.nothing] * len(acc) + [acc[-1]]", "a run starts from the sums of another"),
    Fault(TILES, "x = b.add(x, b.mul(across,", "x = b.add(x, b.mul(I64(0),", "every block of columns reads the first one's"),
    Fault(TILES, 'x = b.add(x, b.mul(e.integer(a["x_group"], group), a["x_plane"]))', "x = x", "groups all stage the first group's channels"),
    Fault(TILES, 'channels = b.select(b.icmp_signed("<", rest, a["stage_channels"]), rest, a["stage_channels"])', 'channels = a["stage_channels"]', "the last stage reads channels that are not there"),
    Fault(TILES, "row_step = code.row_step * code.taps * code.columns", "row_step = code.taps * code.columns", "rows of pixels forget their stride"),
    Fault(TILES, "list(range(0, 2 * self.lanes, 2))", "list(range(1, 2 * self.lanes, 2))", "a stride of two keeps the odd columns"),
    Fault(TILES, 'e.when(b.icmp_signed("<", I64(j), left), partial(line, j))', "line(j)", "rows past the last one are written"),
    Fault(TILES, 'self.lanes_of(a["stored"], vector)])', 'self.lanes_of(a["live"], vector)])', "the gap between rows stays dirty"),
    Fault(TILES, 'zeros(base, b.mul(a["pixel_rows"], a["pitch"]), a["plane_elements"])', "pass", "the border under a plane stays dirty"),
    Fault(STRIDEPACK, "position = j | i << 3 | (channel % stage) << 6", "position = i | j << 3 | (channel % stage) << 6", "positions are transposed"),
    Fault(STRIDEPACK, "(channel % stage * _tile_rows(conv, down) + i * conv.dilation[0])", "(channel % stage * _tile_rows(conv, down) + i)", "rows of the tile forget their dilation"),
    Fault(STRIDEPACK, "return max(0, reach - reads.plane(*conv.size)), max(0, over)", "return max(0, reach - reads.plane(*conv.size) - 16), max(0, over)", "a tile's slack is a vector short"),
    Fault(STRIDEPACK, "work[least] += lengths[k] + 4", "work[least] += 1", "filters are dealt by number, not by work", "tests/test_stridepack.py::test_filters_are_dealt_so_that_groups_take_equal_time"),
    Fault(LISTS, 'b.fcmp_unordered("!=", x,', 'b.fcmp_ordered("!=", x,', "a window of NaNs is taken for zeros"),
    Fault(LISTS, "found = some if found is None else b.or_(found, some)", "found = some", "only the last vector of a window is looked at"),
    Fault(LISTS, "counts = chunk(c, counts, end)", "counts = chunk(c, counts, b.add(row, b.mul(c, a[\"chunk\"])))", "the last, smaller chunk of positions is dropped"),
    Fault(LISTS, "e.choose(b.icmp_signed(\"==\", c, I64(0)), opening, resumed)", "opening()", "sums of earlier chunks are lost"),
    Fault(LISTS, "e.when(b.icmp_signed(\">=\", k, I64(0)),", "e.when(b.icmp_signed(\">=\", k, I64(-1)),", "nobody's sums are stored before the first plane"),
    Fault(LISTS, "possible = b.mul(b.sub(end, row), I64(len(listed)))", "possible = b.sub(end, row)", "windows are counted for one list only", "tests/test_actsparse.py::test_active_windows_are_counted"),
    Fault("methods/actsparse/cpu.py", "mask[~mask.any(1), 0] = True", "mask[:1, :0] = True", "a filter without nonzeros is not written"),
    Fault("backends/watch.py", "if any(share > self._limits.get(node, 1.0)", "if any(False and share > self._limits.get(node, 1.0)", "dense data is not noticed", "tests/test_actsparse.py::test_dense_data_falls_back_and_comes_back"),
    Fault(BANDS, '"top": b.sub(first, wanted),', '"top": I64(0),', "the padding of a band's first rows is taken for rows", "tests/test_pooled.py::test_the_same_bits_as_apart"),
    Fault(BANDS, 'first = b.select(b.icmp_signed("<", first, last), first, last)', "first = b.add(first, I64(0))", "the last band reads past the image", "tests/test_pooled.py::test_the_same_bits_as_apart"),
    Fault(BANDS, "b.select(final, b.sub(a[\"plane_elements\"], done), b.mul(rows, a[\"y_pitch\"]))", "b.mul(rows, a[\"y_pitch\"])", "the border under a pooled plane is left as it was", "tests/test_pooled.py::test_the_same_bits_as_apart"),
    Fault("backends/cpu/lower/pooled.py", "replace(conv, n=1), config", "conv, config", "every band is computed for all images", "tests/test_pooled.py::test_the_same_bits_as_apart"),
    Fault(AMX, "I8(_B[c % 2])", "I8(_B[0])", "both vectors of pixels meet the first one's stage", "tests/test_amx.py::test_emulated_tiles_are_right"),
    Fault(AMX, "b.sdiv(self.padded(count), I64(2)), nothing)", "I64(0), nothing)", "what fills up the last pairs of a stage is whatever stood there", "tests/test_amx.py::test_emulated_tiles_are_right"),
    Fault(AMX, "return self.b.and_(self.b.add(count, I64(PAIRED - 1)), I64(-PAIRED))", "return self.b.and_(count, I64(-PAIRED))", "positions beyond the last 32 are dropped", "tests/test_amx.py::test_emulated_tiles_are_right"),
    Fault(AMX, ".transpose(0, 1, 3, 4, 2)", ".transpose(0, 1, 4, 3, 2)", "a panel's halves are taken for each other's filters", "tests/test_amx.py::test_emulated_tiles_are_right"),
    Fault(BLOCKS, "return ir.IntType(1)(0)", "return super().opening(step)", "what the tiles summed is lost"),
    Fault(BLOCKS, 'done = b.mul(i, a["stage_rows"])', "done = I64(0)", "every stage is the first"),
    Fault(BLOCKS, 'b.select(b.icmp_signed("<", rest, a["stage_rows"]), rest, a["stage_rows"])', 'a["stage_rows"]', "the last stage reads positions that are not there"),
    Fault(BLOCKS, "b.mul(b.sub(p, panel), held)", "b.mul(p, held)", "panels read the values of another tile"),
    Fault(BLOCKS, "b.add(first, i)))", "first))", "every window of a stage is its first"),
    Fault(BLOCKS, "loads[v], acc[f * width + v]])", "loads[0], acc[f * width + v]])", "every vector of a panel is its first"),
    Fault(TILED, 'np.where(a["member"] < 0, widest, slot)', "slot", "sums of nobody are written before the first filter's"),
    Fault(TILED, "config[\"rows\"] * code.width", "(config[\"rows\"] - 1) * code.width", "the stage is a row short"),
    Fault(TILED, "rest[np.ix_(filters, positions)] = 0", "pass", "weights of tiles are rows as well"),
    Fault(TILED, "group = filters.astype(np.int64) // (conv.k // conv.groups)", "group = filters.astype(np.int64) * 0", "tiles all read the first group's channels"),
    Fault("ir/stats.py", "np.flatnonzero(4 * kept > kept.max(initial=0))", "np.flatnonzero(kept)", "filters that TEW dropped hide the tiles", "tests/test_tiled.py::test_single_elements_of_tew_are_rows"),
    Fault("pruning/masks.py", "kept = flat >= edge", "kept = flat > edge", "equal weights all go", "tests/test_pruning.py::test_of_equal_weights_the_first_go_and_no_more_than_asked"),
    Fault(EPILOGUE, 'b.fcmp_ordered("<=", v, parameter)', 'b.fcmp_ordered("<", v, parameter)', "a value at the limit stays"),
    Fault("pruning/boost.py", ">= FEWEST else 0.0", ">= 2 else 0.0", "no limit ever stands", "tests/test_boosting.py"),
    Fault("pruning/boost.py", "score(_with(captured, tried)) <= max_drop", "score(_with(captured, tried)) <= 1", "the budget is overdrawn", "tests/test_boosting.py"),
    Fault("codegen/gpu/stridepack.cu", "        COPIED();\n        BARRIER();\n", "        COPIED();\n", "nobody waits for the staged tile", "tests/test_gpu.py::test_no_thread_races_another"),
    Fault("codegen/gpu/direct.cu", "entry[first + done + j];\n            BARRIER();", "entry[first + done + j];", "nobody waits for the staged nonzeros", "tests/test_gpu.py::test_no_thread_races_another"),
    Fault("codegen/gpu/direct.cu", "for (int j = 0; j < count; ++j)", "for (int j = 1; j < count; ++j)", "the first nonzero of a chunk is left out", "tests/test_gpu.py::test_layers_of_several_stages_and_groups"),
    Fault("codegen/gpu/stage.h", "int there = channel < end && h >= 0 && h < height", "int there = channel < end && h >= 0 && h <= height", "the row after the last is read", "tests/test_gpu.py::test_layers_of_several_stages_and_groups"),
    Fault("codegen/gpu/stridepack.cu", "if ((w) != 0)", "if ((w) == (w))", "padding reads x", "tests/test_gpu.py::test_the_shared_cases_run_right_on_an_opencl_device[stridepack-special]"),
    Fault("methods/stridepack/spf.py", "np.where((serves < 0) & (count > 0), self.load, -1)", "np.where(count > 0, self.load, -1)", "two words of a bank in one slot", "tests/test_gpu.py::test_reorganized_slots_take_each_nonzero_once_and_no_bank_twice"),
    Fault("codegen/gpu/staging.py", "(n - 1) * stride + (size - 1) * dilation + 1", "(n - 1) * stride + (size - 1) * dilation", "the tile is a row short", "tests/test_gpu.py::test_layers_of_several_stages_and_groups"),
    Fault("codegen/gpu/gathered.py", "own = tl.load(member + panel * BLOCK_N + n)", "own = tl.load(member + n)", "every panel writes the first panel's filters: a wrong tile index", "tests/test_triton.py::test_layers_of_many_channels"),
    Fault("codegen/gpu/gathered.py", "value + tl.load(panel_at + panel * 3 + 2)", "value + tl.load(panel_at + panel * 3 + 1)", "a panel takes another panel's values", "tests/test_triton.py::test_layers_of_many_channels"),
    Fault("codegen/gpu/gathered.py", "    real = (k < end)[None, :] & (base == base)[:, None]", "    real = (k == k)[None, :] & (base == base)[:, None]", "positions past the end are read: a dropped mask", "tests/test_triton.py::test_the_shared_cases_run_right_in_the_interpreter[tilewise-special]"),
    Fault("codegen/gpu/gathered.py", "        real = real & (((bits[:, None] >> tl.load(tap + k)[None, :]) & 1) != 0)", "        real = real & (bits == bits)[:, None]", "taps outside of the image are read: a dropped mask", "tests/test_triton.py::test_the_shared_cases_run_right_in_the_interpreter[tilewise-exact]"),
    Fault("codegen/gpu/gathered.py", 'if ADD == "after":', 'if ADD == "never":', "a residual after the activation is forgotten: a wrong epilogue", "tests/test_triton.py::test_layers_of_many_channels"),
    Fault("codegen/gpu/gathered.py", 'elif KIND == "leaky_relu":\n        sums = tl.where(sums > 0', 'elif KIND == "leaky_relu":\n        sums = tl.where(sums < 0', "leaky ReLU is upside down: a wrong epilogue", "tests/test_triton.py::test_the_shared_cases_run_right_in_the_interpreter[blockgemm-exact]"),
    Fault("codegen/gpu/gathered.py", "there = (block * BLOCK_M + tl.arange(0, BLOCK_M) < pixels)[:, None] & (own >= 0)[None, :]\n    if PARTIAL", "there = (block * BLOCK_M + tl.arange(0, BLOCK_M) < pixels)[:, None] & (own == own)[None, :]\n    if PARTIAL", "lanes without a filter store", "tests/test_triton.py::test_the_shared_cases_run_right_in_the_interpreter[blockgemm-exact]"),
    Fault("formats/panels.py", "at = slot[lane // LANES] + number, lane % LANES", "at = slot[lane // LANES] + number, (lane + 1) % LANES", "leftovers go to the next filter", "tests/test_triton.py::test_layers_of_many_channels"),
    Fault("codegen/gpu/actsparse.cu", "        BARRIER();\n        total += found;", "        total += found;", "the list of active positions is read before it is written", "tests/test_gpu.py::test_no_thread_races_another"),
    Fault("codegen/gpu/actsparse.cu", "* PITCH] != 0.0f;", "* PITCH] > 0.0f;", "negative values are skipped", "tests/test_gpu.py::test_the_shared_cases_run_right_on_an_opencl_device[actsparse-exact]"),
    Fault("codegen/gpu/actsparse.cu", "if (p >= 0 && p < rows && q >= 0 && q < columns) best", "if (p < rows && q < columns) best", "a pooling's padding counts as pixels", "tests/test_gpu.py::test_pooling_in_the_same_kernel_has_the_same_bits"),
    Fault("codegen/gpu/element.h", "        sum[1] += half_second(part);", "        sum[1] = half_second(part);", "sums of earlier stages are lost to the second pixel", "tests/test_gpu.py::test_f16_of_several_stages"),
    Fault("codegen/gpu/pad.cu", "h += apart;", "h += apart - 1;", "a word's second pixel is a row too high", "tests/test_gpu.py::test_the_shared_cases_run_right_on_an_opencl_device[direct-half]"),
    Fault("codegen/gpu/stage.h", "h + APART < height", "h + APART <= height", "f16 reads the row after the last", "tests/test_gpu.py::test_the_shared_cases_run_right_on_an_opencl_device[stridepack-half-edges]"),
    Fault("backends/gpu/runner.py", "self._watch.look(self._active())", "self._watch.look({})", "dense data is not noticed on a device", "tests/test_ondevice.py::test_a_layer_that_skips_zeros_goes_back_to_torch_when_there_are_none"),
    Fault("methods/direct/gpu.py", "other=config[\"per\"] + loads + 1.2 + halves", "other=3 * loads + 1.2 + halves", "the cost model counts instructions that are not there", "tests/test_gpu.py::test_the_cost_model_counts_what_the_machine_code_has"),
    Fault("backends/gpu/cuda.py", 'argument = buffers.get(argument, buffers["y"])', 'argument = buffers.get(argument, buffers["x"])', "a missing bias is x", "tests/test_ondevice.py::test_arguments_of_cuda_launches_have_the_kernels_types"),
    Fault("pruning/reprune.py", "order = left[np.argsort(size[left], kind=\"stable\")]", "order = left[np.argsort(-size[left], kind=\"stable\")]", "the heaviest leftovers go first", "tests/test_advise.py::test_repruning_stays_within_the_weight_and_holds"),
    Fault("pruning/advise.py", "gain > best", "gain < best", "a recipe prunes where it gains least", "tests/test_advise.py::test_a_recipe_is_pruned"),
    Fault("capture/network.py", "known[0] != sizes_of(inputs)", "False", "sizes of another call are taken", "tests/test_module.py::test_every_size_has_a_program_of_its_own"),
    Fault(LAYOUT, "zeros = max(self.front, bottom * self.pitch + right, self.pitch - w)", "zeros = max(self.border[0] * self.pitch, bottom * self.pitch, self.pitch - w)", "planes overlap their side borders"),
    Fault(LAYOUT, "return _up(self.border[0] * self.pitch + self.border[1], self.line)", "return self.border[0] * self.pitch // self.line * self.line", "the front is too short"),
    Fault(LAYOUT, "part = padded[:, :, i::u, j::v]", "part = padded[:, :, j::u, i::v]", "phases are transposed"),
    Fault("codegen/cpu/abi.py", "residual + y_front if residual else 0", "residual if residual else 0", "the residual starts at its border"),
    Fault("backends/cpu/threads.py", "self._context[segment.CONTEXT.index(\"threads\")] = 1", "pass", "a forked child enters its parent's pool", "tests/test_workers.py::test_a_forked_child_answers_on_one_thread"),
    Fault("codegen/cpu/segment.py", "_steps(e, context, thread, threads, lambda: e.b.call(barrier, []))", "_steps(e, context, thread, I64(1), lambda: e.b.call(barrier, []))", "every thread does all of the work at once", "tests/test_threads.py"),
    Fault("disk.py", "return raw[32:] if hashlib.sha256(raw[32:]).digest() == raw[:32] else None", "return raw[32:]", "a damaged cache entry is used", "tests/test_llvm.py::test_a_damaged_entry_is_a_miss"),
    Fault("ir/target.py", 'VECTOR_BYTES = {"avx512": 64', 'VECTOR_BYTES = {"avx512": 32', "half of every register is left unused", "tests/test_llvm.py::test_avx512_uses_whole_registers"),
    Fault("backends/cpu/lower/arena.py", "if other.first <= life.last and life.first <= other.last", "if other.first == life.first", "buffers that live at once share memory", "tests/test_search.py::test_the_arena_never_loses_a_value_that_is_still_read"),
    Fault("backends/cpu/lower/convert.py", '"row_first": a - top', '"row_first": a', "copies forget the top border", "tests/test_copies.py::test_copies_are_exact"),
    Fault("backends/cpu/lower/convert.py", "target.front * item if a == b == first == 0 else 0", "0", "copies leave the front dirty", "tests/test_copies.py::test_copies_are_exact"),
    Fault("backends/cpu/lower/pooling.py", '"left": pooling.pad[1]', '"left": 0', "pooling forgets its left padding", "tests/test_copies.py::test_pooling_is_torchs"),
    Fault("capture/alias.py", "            if target in groups:\n", "            if False:\n", "a write into shared memory is taken for one of its own", SAME + "test_aliases"),
    Fault("capture/captured.py", "if not holds(guard, seen):", "if False:", "guards are not looked at", SAME + "test_branches_on_sizes"),
    Fault("capture/export.py", "said += [sympy.Ne(s.node.expr, 1) for s in _symbols(node.args[0].meta[\"val\"])]", "pass", "a squeeze is taken for any batch", RUNS + "test_squeeze_before_a_linear_at_batch_one"),
    Fault("capture/alias.py", "if node.op == \"call_function\" and _idle_dropout(node):", "if False:", "dropout that does nothing is taken for a copy", SAME + "test_aliases"),
    Fault("capture/alias.py", "return composed or torch.Tag.maybe_aliasing_or_mutating in function.tags", "return False", "what torch composes never shares memory", SAME + "test_aliases"),
    Fault("capture/alias.py", "return frozenset(references(graph.outputs)) & borrowed", "return frozenset()", "answers are views of the module's own constants", SAME + "test_outputs_can_be_written_to"),
    Fault("runtime/reading.py", "why = lasting(model, call)", "why = None", "an attribute that forward writes to is taken for a constant", SAME + "test_state_stays_torchs"),
    Fault("capture/fuse.py", "isinstance(node.args[0], Ref) and not random(node):", "isinstance(node.args[0], Ref):", "dropout that is on is left out", SAME + "test_dropout_that_is_on_stays_random_and_is_named"),
    Fault("capture/fuse.py", "return alike and own in self.shapes", "return own in self.shapes", "a residual of another element type is fused", RUNS + "test_odd_neighbours_of_a_convolution"),
    Fault("capture/fuse.py", "if isinstance(x, Ref) and len(self.shapes.get(x.name, ())) != held.dim():", "if False:", "an image without a batch is taken for a batch", RUNS + "test_one_image_without_a_batch"),
    Fault("capture/fuse.py", "            and _finite(node.args[1])\n", "", "an infinite threshold is taken for a number", RUNS + "test_odd_neighbours_of_a_convolution"),
    Fault("capture/interpret.py", "if rest in _RESHAPES:", "if False:", "a view wants memory as torch lays it out", RUNS + "test_views_of_what_a_library_laid_out_its_own_way"),
    Fault("capture/interpret.py", "if wanted > FREE_BYTES and wanted > memory():", "if False:", "a value may be larger than memory", "tests/test_guards.py::test_a_value_larger_than_memory_is_no_model"),
    Fault("ir/guards.py", "if isinstance(raw, str) and raw in known:", "if isinstance(raw, str):", "a guard in a file speaks of sizes that are not there", "tests/test_guards.py::test_hostile_guards_are_refused"),
    Fault("backends/cpu/lower/views.py", "ceil_div(shapes[source][1], how)", "shapes[source][1] // how", "uneven chunks are rounded down", SAME + "test_uneven_chunks"),
    Fault("runtime/state.py", "if held.dim() > 1 and not torch.equal(held != 0, value != 0):", "if held.dim() > 2 and not torch.equal(held != 0, value != 0):", "other zeros of a Linear are let in", "tests/test_mistakes.py::test_states"),
    Fault("tune/whole.py", "if not alike(wanted, answer(ours, other), asked.within):", "if False:", "the answer is not looked at", SAME + "test_an_answer_that_differs_is_torchs"),
    Fault("runtime/others.py", "if len(self._made) + len(self._refused) + 1 >= MOST_PROGRAMS:", "if False:", "programs are made without end", SAME + "test_at_most_eight_programs"),
    Fault("runtime/private.py", "found: nn.Module = copy.deepcopy(model, memo)", "found: nn.Module = model", "the user's own model is run", SAME + "test_later_changes_of_the_original_change_nothing"),
    Fault("runtime/private.py", "same = not wrote and alike(answer(model.eval(), call), inside, 0.0)", "same = True", "a model in training mode is compiled", SAME + "test_training_mode_that_matters_is_an_error"),
    Fault("runtime/private.py", "                    tensor.copy_(earlier)\n", "                    pass\n", "compiling changes buffers", SAME + "test_state_stays_torchs"),
    Fault("runtime/module.py", "if not torch.compiler.is_dynamo_compiling() and torch._C._is_tracing():", "if False:", "an answer becomes a constant of a trace", SAME + "test_tracing_raises"),
    Fault("runtime/module.py", "or torch.is_autocast_enabled(\"cpu\"):", "or False:", "autocast is not seen", SAME + "test_autocast_is_torchs"),
    Fault("runtime/module.py", "(v.shape, v.dtype, v.device, v.layout)", "(v.shape, v.device, v.layout)", "calls of another element type are taken for known ones", RUNS + "test_calls_alike_in_sizes_only_are_told_apart"),
    Fault("runtime/module.py", "held[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value", "held[name] = value", "a state is the module's own memory", SAME + "test_later_changes_of_the_original_change_nothing"),
    Fault("backends/cpu/lower/residency.py", "stays = ours(node.inputs[0]) and node.inputs[0] not in changed", "stays = ours(node.inputs[0])", "a round trip through fp16 does not round", SAME + "test_half_and_back_rounds"),
    Fault("saved/file.py", "\"guards\": [guards.to_json(guard) for guard in captured.guards],", "\"guards\": [],", "a file forgets its guards", SAME + "test_a_saved_file_names_the_guard"),
    Fault("capture/fuse.py", "self.constants[bias].double() * factor", "self.constants[bias].double()", "a folded bias is not scaled", "tests/test_compile.py::test_average_and_linear_run_in_the_segment"),
    Fault("capture/network.py", "array = from_torch(constants[weight] + 0)", "array = from_torch(constants[weight] * 0.999)", "weights are a little off", "tests/test_compile.py::test_every_convolution_runs_on_our_kernels"),
    Fault("backends/cpu/lower/arena.py", "lives[old].last == i and", "", "a residual is overwritten while others still read it", "tests/test_search.py::test_the_arena_never_loses_a_value_that_is_still_read"),
    Fault("backends/cpu/lower/arena.py", "or holder(step.x) == old", "", "a convolution writes over its own input", "tests/test_compile.py::test_a_skip_that_is_rectified_in_place"),
    Fault("backends/cpu/lower/arena.py", "old in inside or", "", "a part of a whole is written over", "tests/test_search.py::test_the_arena_never_loses_a_value_that_is_still_read"),
    Fault("backends/cpu/lower/views.py", "begin >= 0 and end <= at and all(home == (name, a - begin) for a, home in inside)", "True", "a whole takes parts that do not fit it", "tests/test_views.py::test_wholes_of_parts"),
    Fault("backends/cpu/lower/views.py", "        and all(home == (whole, start + low) for low, _, home in places)\n", "", "any concatenation is taken for a view", "tests/test_views.py::test_wholes_of_parts"),
    Fault("codegen/cpu/dot.py", "e.loop(a[\"channels\"], a[\"padded\"]", "e.loop(a[\"padded\"], a[\"padded\"]", "features beyond the last are whatever stood there", "tests/test_features.py::test_sums_are_exact_on_integers"),
    Fault("backends/cpu/lower/features.py", "np.arange(code.lanes)[None] < 1", "np.arange(code.lanes)[None] < 2", "an answer is written over the border", "tests/test_features.py::test_sums_are_exact_on_integers"),
    Fault("capture/transposed.py", "held.permute(1, 2, 3, 0)", "held.permute(1, 3, 2, 0)", "a transposed convolution's taps are transposed", "tests/test_views.py::test_wholes_of_parts"),
    Fault("codegen/cpu/copy.py", "b.mul(b.sdiv(i, repeat), a[\"row_step\"])", "b.mul(i, a[\"row_step\"])", "an enlarged image repeats columns only", "tests/test_views.py::test_wholes_of_parts"),
    Fault("ir/layout.py", "max(self.front, bottom", "max(0, bottom", "the front of a part is its neighbour's pixels", "tests/test_views.py::test_wholes_of_parts"),
    Fault("backends/cpu/workspace.py", "if convolutions.issuperset(users[n])", "if True", "an answer is memory that the next call writes", "tests/test_compile.py::test_average_and_linear_run_in_the_segment"),
    Fault("capture/fuse.py", "if self.shapes.get(node.name) != self.shapes.get(before.name, ())[:2]:", "if False:", "any reshape after a mean is taken for a flatten", "tests/test_compile.py::test_a_mean_reshaped_is_no_flatten"),
    Fault("tune/store.py", "if raw[\"body\"][\"key\"] != key:", "if False:", "a record of another layer is used", "tests/test_store.py::test_a_record_under_another_name_is_a_miss"),
    Fault("tune/store.py", "        if missing:\n", "        if False:\n", "a record may ask for anything", "tests/test_store.py::test_a_forged_record_is_a_miss"),
    Fault("disk.py", "os.replace(scratch, name, src_dir_fd=folder, dst_dir_fd=folder)", "os.replace(scratch, name, src_dir_fd=folder, dst_dir_fd=folder); open(os.open(name, os.O_WRONLY | os.O_TRUNC, dir_fd=folder), 'wb').write(content)", "a record can be torn", "tests/test_disk.py::test_a_writer_killed_at_any_moment_leaves_no_torn_file"),
    Fault("disk.py", "if not _said:", "if True:", "a full disk is said again for every kernel", "tests/test_disk.py::test_a_disk_that_is_full_or_read_only"),
    Fault("runtime/points.py", "return apart.index(min(apart))", "return 0", "other sizes all go to the first point", "tests/test_onnx.py::test_several_tuned_points"),
    Fault("capture/separate.py", "d % rank != 0", "d != 0", "a softmax over the batch, counted from the end, is taken apart", "tests/test_separate.py::test_who_can_run_alone"),
    Fault("compiler.py", "if plan.image_by_image and not separate(network.captured):", "if False:", "a plan may take images apart that are not", "tests/test_separate.py::test_a_plan_cannot_take_images_apart_that_are_not"),
    Fault("backends/cpu/runner.py", "            done += size\n", "", "only the first images of a batch are run", "tests/test_separate.py::test_the_same_answers"),
    Fault("pruning/prune.py", "held.mask.copy_(kept & held.mask)", "held.mask.copy_(kept)", "what was pruned may come back", "tests/test_pruning.py::test_masks_hold_through_training"),
    Fault("pruning/masks.py", "kept[order[gone]] = False", "kept[order[~gone]] = False", "the most important weights go", "tests/test_pruning.py::test_as_much_as_asked"),
    Fault("tune/search.py", "return timing.ratio_p25 > KEEP", "return timing.ratio_p50 > 0.9", "a slower candidate is kept", "tests/test_search.py::test_keep_or_drop"),
    Fault("ir/tensors.py", "return F.pad(x, (left, right, top, bottom)), (0, 0)", "return F.pad(x, (right, left, top, bottom)), (0, 0)", "uneven padding is mirrored", "tests/test_dense.py::test_without_a_private_op_the_plain_form_remains"),
    Fault(SUMS, "return np.repeat(value, 2) if summed == \"f16\" else value", "return value", "fp16 nonzeros stand once where they are read as pairs", "tests/test_neon.py::test_a_sample_runs_right_under_qemu"),
    Fault(SUMS, "[n for n in sizes if nonzeros * n <= HALF_ROW * conv.k * own] or sizes[:1]", "sizes", "rows of any length are summed in fp16", "tests/test_half.py::test_only_short_rows_are_summed_in_fp16"),
    Fault("codegen/cpu/copy.py", "e.narrow(e.widen(value, code.reads, \"f32\", 0), code.writes, 0)", "e.narrow(e.widen(value, code.reads, \"f32\", 0), code.writes, 0) if code.reads != \"bf16\" else ir.Constant(kind, None)", "bf16 maps are zero for torch", "tests/test_half.py::test_a_network_in_half_is_one_segment"),
    Fault("capture/half.py", "outputs = work.wanted(graph.outputs)", "outputs = graph.outputs", "answers come back in half precision", "tests/test_half.py::test_a_network_in_half_is_one_segment"),
    Fault("capture/half.py", "if changed not in self.known:", "if True:", "a value is cast once for each reader", "tests/test_half.py::test_inputs_outputs_and_what_torch_keeps"),
    Fault("capture/half.py", "work.add(node, (node.layer or node.name) not in half.stay)", "work.add(node, True)", "layers that must stay f32 do not", "tests/test_half.py::test_a_layer_that_overflows_stays_f32_by_name"),
    Fault("tune/error.py", "if not lost <= allowed:", "if not lost <= 1e3 * allowed:", "layers may lose a thousand times as much", "tests/test_half.py::test_a_network_in_half_is_one_segment"),
    Fault("backends/cpu/lower/residency.py", "and parts[node.name][0] not in changed", "", "a piece is cut out of a map that stands nowhere", "tests/test_half.py::test_pieces_of_a_cast"),
    Fault(REFERENCE, "gamma(count, summed) * size", "1e3 * gamma(count, summed) * size", "the bound of fp16 sums is a thousand times too wide", "tests/test_reference.py::test_bound_of_fp16_sums_is_by_block"),
    Fault('disk.py', '                _trusted(found, real, last=True)\n                same', '                same', 'a file that others can write is mapped', 'tests/test_fleet.py::test_what_others_can_write_is_copied'),
    Fault('saved/packed.py', '        form.check(packed, conv)\n', '', 'packed arrays are not looked at', 'tests/test_fleet.py::test_every_packed_array_is_looked_at'),
    Fault('backends/cpu/runner.py', '    if not separate(network.captured):\n        return ()\n', '', 'images that meet are cut apart', 'tests/test_fleet.py::test_images_that_meet_stay_together'),
    Fault('backends/cpu/runner.py', '                    self._within(key)\n', '', 'idle workspaces have no limit', 'tests/test_fleet.py::test_workspaces_stay_within_a_limit'),
    Fault('codegen/cpu/llvm.py', 'compiled(f"{isa}-{key}.o"', 'compiled(f"x{isa}-{key}.o"', 'warm code is not found again', 'tests/test_fleet.py::test_after_warm_nothing_is_compiled'),
    Fault('backends/cpu/threads.py', 'now > wanted and by_default(now)', 'now > wanted', 'a number of threads that somebody set is changed', 'tests/test_fleet.py::test_threads_follow_the_quota'),
    Fault('tune/agreed.py', 'least = 2 if len(records) >= SEVERAL else 1', 'least = 1', 'a forged record decides', 'tests/test_fleet_store.py::test_one_record_of_three_decides_nothing'),
    Fault('tune/agreed.py', 'if len(group) == most for record', 'for record', 'a forged model decides', 'tests/test_fleet_store.py::test_one_record_of_three_decides_nothing'),
    Fault('tune/fleet.py', 'if _RECORD.fullmatch(name) and size', 'if size', "a store's names are taken as they are", 'tests/test_fleet_store.py::test_a_store_that_fails_costs_three_seconds'),
    Fault('ir/zeros.py', 'flat[where] = kept', 'flat[where] = 2 * kept', 'weights change on their way', 'tests/test_fleet.py::test_another_process_has_the_packed_form'),
    Fault('saved/container.py', '(raw.ctypes.data - first) % LINE_BYTES', 'False', 'packed arrays lie anywhere', 'tests/test_fleet.py::test_a_packed_array_begins_with_a_line'),
    Fault("saved/container.py", "if digest != _digest(metadata, tensors):", "if False:", "damaged files are let in", "tests/test_hostile.py::test_every_flip_and_every_cut"),
    Fault("capture/onnx/file.py", "and path.is_relative_to(folder)", "", "a link leads out of the model's folder", "tests/test_hostile.py::test_hostile_onnx_under_limits"),
    Fault("capture/onnx/operators.py", "and maker.args == (own,)", "", "any gate is taken for SiLU", "tests/test_onnx.py::test_a_gate_of_another_value_is_no_silu"),
    Fault("capture/onnx/quantized.py", "if r.file.readers(a[\"first\"]) != {\"DequantizeLinear\"}:", "if False:", "integers that someone reads are none", "tests/test_onnx.py::test_operators_by_onnx_own_tests"),
    Fault("capture/captured.py", "if type(value) is not type(example) or not same:", "if False:", "a number that was built in is not looked at", "tests/test_compile.py::test_numbers_beside_tensors"),
    Fault("saved/file.py", "    found = understood(network.graph, network.constants, example)\n", "    found = None\n", "a graph that makes no sense is let in", "tests/test_saved.py::test_a_graph_that_makes_no_sense_is_refused"),
    Fault("ir/graph.py", "and args[1] >= 0", "", "a piece counted from the end is read elsewhere", "tests/test_attacks_files.py::test_a_hostile_model_is_refused[13b one counted from the end]"),
    Fault("disk.py", "if found.st_mode & 0o022 and not sticky:", "if False:", "code that others may write is run", "tests/test_attacks_files.py::test_10_code_that_others_could_have_written_is_not_run"),
    Fault("disk.py", "if found.st_uid not in (0, os.geteuid()):", "if False:", "another user's code is run", "tests/test_attacks_files.py::test_10_code_that_others_could_have_written_is_not_run"),
    Fault("disk.py", "os.O_CREAT | os.O_EXCL |", "os.O_CREAT |", "a file that stands at the scratch name is written to", "tests/test_disk.py::test_a_link_at_the_scratch_name_is_not_followed"),
    Fault("capture/interpret.py", "if found._schema.is_mutable:", "if False:", "an operator of a file writes to the caller's tensor", "tests/test_attacks_files.py::test_a_hostile_model_is_refused[7 out=]"),
    Fault("capture/interpret.py", "if isinstance(found, int) and not -MOST < found < MOST:", "if False:", "numbers in a file grow without end", "tests/test_attacks_files.py::test_a_hostile_model_is_refused[1 squarings]"),
    Fault("capture/pieces.py", "if node.op_type in _ENDLESS:", "if False:", "a loop without end is let through to onnxruntime", "tests/test_attacks_files.py::test_a_hostile_model_is_refused[2 loop]"),
    Fault("capture/sizes.py", "most = max(FREE_BYTES, TIMES * self.given_bytes)", "most = 1 << 60", "a number in a file asks for any memory", "tests/test_attacks_files.py::test_a_hostile_model_is_refused[5f what memory has room for]"),
    Fault("backends/cpu/threads.py", "        torch.set_num_threads(wanted)\n", "        pass\n", "torch's own layers hang in a forked child", "tests/test_workers.py::test_a_forked_child_answers_at_a_new_shape"),
    Fault("codegen/cpu/llvm.py", "while len(_recent) > STRONG:", "while False:", "code that nothing uses is kept for ever", "tests/test_llvm.py::test_code_that_nothing_uses_is_freed"),
    Fault("codegen/cpu/llvm.py", "create_lljit_compiler(use_jit_link=True)", "create_lljit_compiler()", "large mappings abort the linker", "tests/test_llvm.py::test_large_mappings_do_not_abort_the_linker"),
    Fault("tune/store.py", 'if found.how in (GRAPH, *ways)', "if True", "a record runs the model in any way it says", "tests/test_attacks_files.py::test_11_a_record_that_runs_the_model_in_no_known_way_is_a_miss"),
    Fault(REFERENCE, "i * dh : i * dh + (p - 1) * u + 1 : u", "i : i + (p - 1) * u + 1 : u", "the oracle forgets dilation", "tests/test_reference.py::test_reference_is_torch_in_float64"),
    Fault(REFERENCE, "return np.where(v < 0, 0.0, np.where(v > 6, 6.0, v))", "return np.where(v < 0, 0.0, v)", "the oracle's ReLU6 has no 6", "tests/test_reference.py::test_activations_are_torchs"),
    Fault(REFERENCE, "error = gamma(roundings, \"f32\") * (total", "error = 1e3 * gamma(roundings, \"f32\") * (total", "the bound is a thousand times too wide", "tests/test_reference.py::test_bound_is_the_papers_formula"),
)  # fmt: skip


def words(fault: Fault) -> list[list[str]]:
    """Its own smallest test, then everything that the list names: on another machine the smallest may be
    another."""
    own = smallest().get(fault.why)
    return [*([own] if own else []), *_wide(fault)]


def _wide(fault: Fault) -> list[list[str]]:
    on_gpu = re.search(r"::test_the_shared_cases_\w+\[(\w+)-([\w-]+)\]", fault.caught_by)
    if on_gpu:
        return [
            ["tests.suite.gpu", "--method", on_gpu[1], "--kind", on_gpu[2], "--stop", "1", "--count", "40"]
        ]
    if fault.caught_by != SUITE:
        return [[fault.caught_by]]
    method = METHOD.get(fault.file, "direct")
    sweeps = (*(IDLE if method == "actsparse" else ()), *SWEEPS)
    head = ["tests.suite", "--method", method, "--stop", "1"]
    return [
        [*head, "--kind", kind, "--threads", threads, "--count", str(count)]
        for kind, count, threads in sweeps
    ]


def smallest() -> dict[str, list[str]]:
    """What catches each fault alone, as `--locate` found it: a case of the suite or one test."""
    return json.loads(SMALLEST.read_text()) if SMALLEST.exists() else {}


def run(fault: Fault, server: Server) -> dict[str, Any]:
    """What came of it: `caught` says how, and is empty for a survivor."""
    return server.ask(fault.file, fault.find, fault.put, *words(fault))


def locate(fault: Fault, server: Server) -> list[str] | None:
    """The first single case or test that catches the fault when nothing ran before it."""
    for wide in _wide(fault):
        if fault.caught_by != SUITE:
            answer = server.ask(fault.file, fault.find, fault.put, wide)
            named = re.search(r"python -m (tests\.suite\.gpu .*?) +#", answer["said"])
            found = named[1].split() if named else answer["failed"][:1] or wide
            return (
                found
                if answer["caught"] and server.ask(fault.file, fault.find, fault.put, found)["caught"]
                else None
            )
        first, count = 0, int(wide[-1])
        while first < count:
            asked = [*wide[:-1], str(count - first), "--seed", str(first), "--trace"]
            answer = server.ask(fault.file, fault.find, fault.put, asked)
            if not answer["caught"] or not answer["traced"]:
                break
            found = shlex.split(answer["traced"][0])
            if server.ask(fault.file, fault.find, fault.put, found)["caught"]:
                return found
            first = int(found[found.index("--seed") + 1]) + 1
    return None


def _locate_all(chosen: list[tuple[int, Fault]], server: Server) -> int:
    lost = 0
    for number, fault in chosen:
        found = locate(fault, server)
        lost += found is None
        print(f"{number:3d} {fault.why}: {'NOT FOUND' if found is None else ' '.join(found)}", flush=True)
        if found is not None:
            known = smallest() | {fault.why: found}
            ordered = {f.why: known[f.why] for f in FAULTS if f.why in known}
            lines = [f"  {json.dumps(why)}: {json.dumps(own)}" for why, own in ordered.items()]
            SMALLEST.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return lost


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--only", type=int, nargs="*", help="the numbers of some faults")
    parser.add_argument(
        "--locate", action="store_true", help="find the smallest test of those that have none, or of --only"
    )
    given = parser.parse_args()
    chosen = [(n, fault) for n, fault in enumerate(FAULTS) if given.only is None or n in given.only]
    server, survivors = Server(), 0
    if given.locate:
        missing = [(n, fault) for n, fault in chosen if given.only is not None or fault.why not in smallest()]
        return 1 if _locate_all(missing, server) else 0
    for number, fault in chosen:
        done = run(fault, server)
        survivors += not done["caught"] and not done["skipped"]
        said = (
            f"caught by {done['caught']}"
            if done["caught"]
            else "not tried, a tool is missing"
            if done["skipped"]
            else "SURVIVED"
        )
        print(f"{number:3d} {fault.why}: {said}", flush=True)
    server.close()
    print(f"{survivors} of {len(chosen)} faults survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

"""Faults seeded by hand, one at a time, each of which the tests must catch.

    python -m tests.faults             every fault; prints who caught it and fails on a survivor
    python -m tests.faults --only 7    one of them

A fault is a file, the text to find in it (exactly once) and what to put there instead, in a copy of the sources. The shared suite
runs first (a crash counts: guard pages work by crashing); a fault that lives elsewhere names its test.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SUITE = "suite"
CACHE = ROOT / ".pytest_cache" / "aerogel"  # shared: its keys hold a digest of the code generator, broken or not
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


ROWS, TILES, SUMS = "codegen/rows.py", "codegen/tiles.py", "codegen/sums.py"
EPILOGUE, EMIT, STRIDEPACK = "codegen/epilogue.py", "codegen/emit.py", "methods/stridepack.py"
AMX, BANDS, LISTS, BLOCKS, TILED = "codegen/amx.py", "codegen/bands.py", "codegen/lists.py", "codegen/blocks.py", "codegen/tiled.py"
DIRECT, FLAT, LAYOUT, REFERENCE = "methods/direct.py", "codegen/flat.py", "layout.py", "reference.py"

METHOD = {TILES: "stridepack", STRIDEPACK: "stridepack", BLOCKS: "tilewise", TILED: "tilewise", LISTS: "actsparse"}
METHOD["methods/actsparse.py"] = "actsparse"
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
    Fault(ROWS, 'scratch = self.e.at(a["scratch"], b.mul(thread, a["scratch_thread"]))', 'scratch = a["scratch"]', "threads share one scratch", "tests/test_pool.py::test_a_thread_writes_no_other_threads_scratch"),
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
    Fault(EPILOGUE, "b.fmul(x, constant(lanes, 0.0)), below)", "below, below)", "SiLU of very negative numbers does not vanish"),
    Fault(EPILOGUE, 'b.select(b.fcmp_ordered(">", v, zero), v, b.fmul(v, parameter))', 'b.select(b.fcmp_ordered("<", v, zero), v, b.fmul(v, parameter))', "LeakyReLU leaks upwards"),
    Fault(EMIT, "_fill(I32, lanes, 0x7FFF)", "_fill(I32, lanes, 0x8000)", "bf16 ties round away from even", "tests/test_epilogue.py::test_stores_round_to_nearest_even"),
    Fault(EMIT, "kept = self.b.select(self.b.fcmp_unordered(\"uno\", value, value), quiet, rounded)", "kept = self.b.lshr(bits, _fill(I32, lanes, 1))", "bf16 is stored shifted"),
    Fault(FLAT, "row, column = i * conv.dilation[0] - top, j * conv.dilation[1] - left", "row, column = i - top, j - left", "dilation is forgotten"),
    Fault(FLAT, "row, column = i * conv.dilation[0] - top, j * conv.dilation[1] - left", "row, column = i * conv.dilation[1] - top, j * conv.dilation[0] - left", "dilation's two numbers are swapped"),
    Fault(FLAT, "row // u * reads.pitch + column // v)", "row // u * reads.pitch + column // u)", "the column's stride is taken for the row's"),
    Fault(FLAT, "first = a[\"row\"].astype(np.int64) // (conv.k // conv.groups)", "first = a[\"row\"].astype(np.int64) * 0", "groups all read the first group's channels"),
    Fault(FLAT, "live = (number < pixels) & (number % writes.pitch < q)", "live = number < pixels", "the gap between rows is taken for pixels"),
    Fault(FLAT, "blocks = -(-live_vectors // code.vectors)", "blocks = max(1, live_vectors // code.vectors)", "the last block is left out"),
    Fault(DIRECT, "= widest * code.vectors * code.lanes * 4 if", "= (widest - 1) * code.vectors * code.lanes * 4 if", "scratch is one filter short"),
    Fault(FLAT, "return max(0, int(every.max()) + reach - conv.c * reads.plane(*conv.size)),", "return max(0, int(every.max()) + reach - conv.c * reads.plane(*conv.size) - 16),", "x's slack is a vector short"),
    Fault(FLAT, "nonzeros = by_rank(rank[pair])", "nonzeros = np.arange(len(filters))", "nonzeros are not sorted into their rows"),
    Fault(FLAT, "else work, groups)", "else work, groups)[:-1]", "the last group of filters is lost"),
    Fault(FLAT, "or a[\"position\"].max() >= c * r * s", "or a[\"position\"].max() > c * r * s", "a position one past the filter is let in", "tests/test_direct.py::test_every_damaged_array_is_found"),
    Fault(FLAT, "or (np.diff(start) < 0).any()", "or False", "row starts that go back are let in", "tests/test_direct.py::test_every_damaged_array_is_found"),
    Fault(FLAT, "reads.slack < x_slack or", "", "a layout without slack is let in", "tests/test_direct.py::test_layouts_that_would_read_outside_are_refused"),
    Fault(FLAT, "every = every + -every % lanes", "every = every - every % lanes", "x's slack forgets that a run reads whole vectors", "tests/test_direct.py::test_slack_covers_what_the_last_run_reads"),
    Fault(FLAT, "return (offset - offset % lanes)[order]", "return offset[order]", "windows of a run are moved twice"),
    Fault(FLAT, "np.cumsum(counts)]).astype(np.int32), value[order]", "np.cumsum(counts)]).astype(np.int32), value", "values are not sorted into their runs"),
    Fault(ROWS, "list(range(shift, shift + self.lanes))", "list(range(shift - 1, shift - 1 + self.lanes))", "a run's sums are moved one lane short"),
    Fault(ROWS, "[self.nothing] * (len(acc) + 1)", "[self.nothing] * len(acc) + [acc[-1]]", "a run starts from the sums of another"),
    Fault(TILES, "x = b.add(x, b.mul(across,", "x = b.add(x, b.mul(I64(0),", "every block of columns reads the first one's"),
    Fault(TILES, 'x = b.add(x, b.mul(e.integer(a["x_group"], group), a["x_plane"]))', "x = x", "groups all read the first group's channels"),
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
    Fault("methods/actsparse.py", "mask[~mask.any(1), 0] = True", "mask[:1, :0] = True", "a filter without nonzeros is not written"),
    Fault("runtime/watch.py", "failed |= active - old_active >", "failed |= False and active - old_active >", "dense data is not noticed", "tests/test_actsparse.py::test_dense_data_falls_back_and_comes_back"),
    Fault(BANDS, '"top": b.sub(first, wanted),', '"top": I64(0),', "the padding of a band's first rows is taken for rows", "tests/test_fused.py::test_the_same_bits_as_apart"),
    Fault(BANDS, 'first = b.select(b.icmp_signed("<", first, last), first, last)', "first = b.add(first, I64(0))", "the last band reads past the image", "tests/test_fused.py::test_the_same_bits_as_apart"),
    Fault(BANDS, "b.select(final, b.sub(a[\"plane_elements\"], done), b.mul(rows, a[\"y_pitch\"]))", "b.mul(rows, a[\"y_pitch\"])", "the border under a pooled plane is left as it was", "tests/test_fused.py::test_the_same_bits_as_apart"),
    Fault("runtime/fused.py", "replace(conv, n=1), config", "conv, config", "every band is computed for all images", "tests/test_fused.py::test_the_same_bits_as_apart"),
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
    Fault(TILED, "first = filters.astype(np.int64) // (conv.k // conv.groups)", "first = filters.astype(np.int64) * 0", "tiles all read the first group's channels"),
    Fault("candidate.py", "np.flatnonzero(4 * kept > kept.max(initial=0))", "np.flatnonzero(kept)", "filters that TEW dropped hide the tiles", "tests/test_tiled.py::test_single_elements_of_tew_are_rows"),
    Fault("pruning/masks.py", "kept = flat >= edge", "kept = flat > edge", "equal weights all go", "tests/test_pruning.py::test_of_equal_weights_the_first_go_and_no_more_than_asked"),
    Fault(EPILOGUE, 'b.fcmp_ordered("<=", v, parameter)', 'b.fcmp_ordered("<", v, parameter)', "a value at the limit stays"),
    Fault("boosting.py", ">= FEWEST else 0.0", ">= 2 else 0.0", "no limit ever stands", "tests/test_boosting.py"),
    Fault("boosting.py", "<= max_drop else (low, share, limits)", "<= 1 else (low, share, limits)", "the budget is overdrawn", "tests/test_boosting.py"),
    Fault("codegen/gpu/stridepack.cu", "        COPIED();\n        BARRIER();\n", "        COPIED();\n", "nobody waits for the staged tile", "tests/test_gpu.py::test_no_thread_races_another"),
    Fault("codegen/gpu/direct.cu", "entry[first + done + j];\n            BARRIER();", "entry[first + done + j];", "nobody waits for the staged nonzeros", "tests/test_gpu.py::test_no_thread_races_another"),
    Fault("codegen/gpu/direct.cu", "for (int j = 0; j < count; ++j)", "for (int j = 1; j < count; ++j)", "the first nonzero of a chunk is left out", "tests/test_gpu.py::test_layers_of_several_stages_and_groups"),
    Fault("codegen/gpu/stage.h", "int there = channel < end && h >= 0 && h < height", "int there = channel < end && h >= 0 && h <= height", "the row after the last is read", "tests/test_gpu.py::test_layers_of_several_stages_and_groups"),
    Fault("codegen/gpu/stridepack.cu", "if ((w) != 0)", "if ((w) == (w))", "padding reads x", "tests/test_gpu.py::test_the_shared_cases_run_right_on_an_opencl_device[stridepack-special]"),
    Fault("codegen/gpu/spf.py", "np.where((serves < 0) & (count > 0), self.load, -1)", "np.where(count > 0, self.load, -1)", "two words of a bank in one slot", "tests/test_gpu.py::test_reorganized_slots_take_each_nonzero_once_and_no_bank_twice"),
    Fault("codegen/gpu/staging.py", "(n - 1) * stride + (size - 1) * dilation + 1", "(n - 1) * stride + (size - 1) * dilation", "the tile is a row short", "tests/test_gpu.py::test_layers_of_several_stages_and_groups"),
    Fault("codegen/gpu/gathered.py", "own = tl.load(member + panel * BLOCK_N + n)", "own = tl.load(member + n)", "every panel writes the first panel's filters: a wrong tile index", "tests/test_triton.py::test_layers_of_many_channels"),
    Fault("codegen/gpu/gathered.py", "values = value + tl.load(panel_at + panel * 3 + 2)", "values = value + tl.load(panel_at + panel * 3 + 1)", "a panel takes another panel's values", "tests/test_triton.py::test_layers_of_many_channels"),
    Fault("codegen/gpu/gathered.py", "    real = (k < end)[None, :] & (base == base)[:, None]", "    real = (k == k)[None, :] & (base == base)[:, None]", "positions past the end are read: a dropped mask", "tests/test_triton.py::test_the_shared_cases_run_right_in_the_interpreter[tilewise-special]"),
    Fault("codegen/gpu/gathered.py", "        real = real & (((bits[:, None] >> tl.load(tap + k)[None, :]) & 1) != 0)", "        real = real & (bits == bits)[:, None]", "taps outside of the image are read: a dropped mask", "tests/test_triton.py::test_the_shared_cases_run_right_in_the_interpreter[tilewise-exact]"),
    Fault("codegen/gpu/gathered.py", 'if ADD == "after":', 'if ADD == "never":', "a residual after the activation is forgotten: a wrong epilogue", "tests/test_triton.py::test_layers_of_many_channels"),
    Fault("codegen/gpu/gathered.py", 'elif KIND == "leaky":\n        sums = tl.where(sums > 0', 'elif KIND == "leaky":\n        sums = tl.where(sums < 0', "leaky ReLU is upside down: a wrong epilogue", "tests/test_triton.py::test_the_shared_cases_run_right_in_the_interpreter[blockgemm-exact]"),
    Fault("codegen/gpu/gathered.py", "there = (block * BLOCK_M + tl.arange(0, BLOCK_M) < pixels)[:, None] & (own >= 0)[None, :]\n    if PARTIAL", "there = (block * BLOCK_M + tl.arange(0, BLOCK_M) < pixels)[:, None] & (own == own)[None, :]\n    if PARTIAL", "lanes without a filter store", "tests/test_triton.py::test_the_shared_cases_run_right_in_the_interpreter[blockgemm-exact]"),
    Fault("codegen/gpu/panels.py", "at = slot[lane // LANES] + number, lane % LANES", "at = slot[lane // LANES] + number, (lane + 1) % LANES", "leftovers go to the next filter", "tests/test_triton.py::test_layers_of_many_channels"),
    Fault("codegen/gpu/actsparse.cu", "        BARRIER();\n        total += found;", "        total += found;", "the list of active positions is read before it is written", "tests/test_gpu.py::test_no_thread_races_another"),
    Fault("codegen/gpu/actsparse.cu", "* PITCH] != 0.0f;", "* PITCH] > 0.0f;", "negative values are skipped", "tests/test_gpu.py::test_the_shared_cases_run_right_on_an_opencl_device[actsparse-exact]"),
    Fault("codegen/gpu/actsparse.cu", "if (p >= 0 && p < rows && q >= 0 && q < columns) best", "if (p < rows && q < columns) best", "a pooling's padding counts as pixels", "tests/test_gpu.py::test_pooling_in_the_same_kernel_has_the_same_bits"),
    Fault("codegen/gpu/element.h", "        sum[1] += half_second(part);", "        sum[1] = half_second(part);", "sums of earlier stages are lost to the second pixel", "tests/test_gpu.py::test_f16_of_several_stages"),
    Fault("codegen/gpu/pad.cu", "h += apart;", "h += apart - 1;", "a word's second pixel is a row too high", "tests/test_gpu.py::test_the_shared_cases_run_right_on_an_opencl_device[direct-half]"),
    Fault("codegen/gpu/stage.h", "h + APART < height", "h + APART <= height", "f16 reads the row after the last", "tests/test_gpu.py::test_the_shared_cases_run_right_on_an_opencl_device[stridepack-half-edges]"),
    Fault("runtime/gpu/module.py", "layer.active() > self.limits[n]", "layer.active() < self.limits[n]", "a layer is given up when it skips most", "tests/test_ondevice.py::test_a_layer_that_skips_zeros_goes_back_to_torch_when_there_are_none"),
    Fault("methods/gpu/direct.py", "other=config[\"per\"] + loads + 1.2 + halves", "other=3 * loads + 1.2 + halves", "the cost model counts instructions that are not there", "tests/test_gpu.py::test_the_cost_model_counts_what_the_machine_code_has"),
    Fault("runtime/gpu/cuda.py", 'argument = buffers.get(argument, buffers["y"])', 'argument = buffers.get(argument, buffers["x"])', "a missing bias is x", "tests/test_ondevice.py::test_arguments_of_cuda_launches_have_the_kernels_types"),
    Fault("repruning.py", "order = left[np.argsort(size[left], kind=\"stable\")]", "order = left[np.argsort(-size[left], kind=\"stable\")]", "the heaviest leftovers go first", "tests/test_advise.py::test_repruning_stays_within_the_weight_and_holds"),
    Fault("advice.py", "gain > best", "gain < best", "a recipe prunes where it gains least", "tests/test_advise.py::test_a_recipe_is_pruned"),
    Fault("runtime/module.py", "known[0] != _sizes(inputs)", "False", "sizes of another call are taken", "tests/test_module.py::test_every_size_has_a_program_of_its_own"),
    Fault(LAYOUT, "zeros = max(self.front, bottom * self.pitch + right, self.pitch - w)", "zeros = max(self.border[0] * self.pitch, bottom * self.pitch, self.pitch - w)", "planes overlap their side borders"),
    Fault(LAYOUT, "return _up(self.border[0] * self.pitch + self.border[1], self.line)", "return self.border[0] * self.pitch // self.line * self.line", "the front is too short"),
    Fault(LAYOUT, "part = padded[:, :, i::u, j::v]", "part = padded[:, :, j::u, i::v]", "phases are transposed"),
    Fault("candidate.py", "residual + y_front if residual else 0", "residual if residual else 0", "the residual starts at its border"),
    Fault("runtime/pool.py", "self._context[segment.CONTEXT.index(\"threads\")] = 1", "pass", "a forked child enters its parent's pool", "tests/test_pool.py::test_a_forked_child_answers_on_one_thread"),
    Fault("codegen/segment.py", "_steps(e, context, thread, threads, lambda: e.b.call(barrier, []))", "_steps(e, context, thread, I64(1), lambda: e.b.call(barrier, []))", "every thread does all of the work at once", "tests/test_threads.py"),
    Fault("disk.py", "if hashlib.sha256(raw[32:]).digest() == raw[:32]:", "if True:", "a damaged cache entry is used", "tests/test_llvm.py::test_a_damaged_entry_is_a_miss"),
    Fault("target.py", 'VECTOR_BYTES = {"avx512": 64', 'VECTOR_BYTES = {"avx512": 32', "half of every register is left unused", "tests/test_llvm.py::test_avx512_uses_whole_registers"),
    Fault("runtime/arena.py", "if other.first <= life.last and life.first <= other.last", "if other.first == life.first", "buffers that live at once share memory", "tests/test_search.py::test_the_arena_never_loses_a_value_that_is_still_read"),
    Fault("runtime/convert.py", '"row_first": a - top', '"row_first": a', "copies forget the top border", "tests/test_copies.py::test_copies_are_exact"),
    Fault("runtime/convert.py", "target.front * item if a == b == first == 0 else 0", "0", "copies leave the front dirty", "tests/test_copies.py::test_copies_are_exact"),
    Fault("runtime/pooling.py", '"left": pooling.pad[1]', '"left": 0', "pooling forgets its left padding", "tests/test_copies.py::test_pooling_is_torchs"),
    Fault("capture/export.py", "if target.name in self.viewed or target.name in self.viewed.values():", "if False:", "a write into a view is taken for one of its own", "tests/test_compile.py::test_a_write_into_a_view_is_never_lost"),
    Fault("capture/fuse.py", "self.constants[bias].double() * factor", "self.constants[bias].double()", "a folded bias is not scaled", "tests/test_compile.py::test_average_and_linear_run_in_the_segment"),
    Fault("runtime/module.py", "self.arrays[weight] = from_torch(constants[weight] + 0)", "self.arrays[weight] = from_torch(constants[weight] * 0.999)", "weights are a little off", "tests/test_compile.py::test_every_convolution_runs_on_our_kernels"),
    Fault("runtime/arena.py", "lives[old].last == i and", "", "a residual is overwritten while others still read it", "tests/test_search.py::test_the_arena_never_loses_a_value_that_is_still_read"),
    Fault("runtime/arena.py", "or holder(step.x) == old", "", "a convolution writes over its own input", "tests/test_compile.py::test_a_skip_that_is_rectified_in_place"),
    Fault("runtime/arena.py", "old in inside or", "", "a part of a whole is written over", "tests/test_search.py::test_the_arena_never_loses_a_value_that_is_still_read"),
    Fault("runtime/views.py", "begin >= 0 and end <= at and all(home == (name, a - begin) for a, home in inside)", "True", "a whole takes parts that do not fit it", "tests/test_views.py::test_wholes_of_parts"),
    Fault("runtime/views.py", "if node.name not in found and whole in ours and all(home == (whole, start + low) for low, _, home in places):", "if node.name not in found and whole in ours:", "any concatenation is taken for a view", "tests/test_views.py::test_wholes_of_parts"),
    Fault("codegen/dot.py", "e.loop(a[\"channels\"], a[\"padded\"]", "e.loop(a[\"padded\"], a[\"padded\"]", "features beyond the last are whatever stood there", "tests/test_features.py::test_sums_are_exact_on_integers"),
    Fault("runtime/features.py", "np.arange(code.lanes)[None] < 1", "np.arange(code.lanes)[None] < 2", "an answer is written over the border", "tests/test_features.py::test_sums_are_exact_on_integers"),
    Fault("capture/transposed.py", "held.permute(1, 2, 3, 0)", "held.permute(1, 3, 2, 0)", "a transposed convolution's taps are transposed", "tests/test_views.py::test_wholes_of_parts"),
    Fault("codegen/copy.py", "b.mul(b.sdiv(i, repeat), a[\"row_step\"])", "b.mul(i, a[\"row_step\"])", "an enlarged image repeats columns only", "tests/test_views.py::test_wholes_of_parts"),
    Fault("layout.py", "max(self.front, bottom", "max(0, bottom", "the front of a part is its neighbour's pixels", "tests/test_views.py::test_wholes_of_parts"),
    Fault("runtime/workspace.py", "if convolutions.issuperset(users[n])", "if True", "an answer is memory that the next call writes", "tests/test_compile.py::test_average_and_linear_run_in_the_segment"),
    Fault("capture/fuse.py", "if self.shapes.get(node.name) != self.shapes.get(before.name, ())[:2]:", "if False:", "any reshape after a mean is taken for a flatten", "tests/test_compile.py::test_a_mean_reshaped_is_no_flatten"),
    Fault("tune/store.py", "if raw[\"body\"][\"key\"] != key:", "if False:", "a record of another layer is used", "tests/test_store.py::test_a_record_under_another_name_is_a_miss"),
    Fault("tune/store.py", "        if missing:\n", "        if False:\n", "a record may ask for anything", "tests/test_store.py::test_a_forged_record_is_a_miss"),
    Fault("disk.py", "os.replace(scratch, path)", "path.write_bytes(content)", "a record can be torn", "tests/test_disk.py::test_a_writer_killed_at_any_moment_leaves_no_torn_file"),
    Fault("disk.py", "if not _said:", "if True:", "a full disk is said again for every kernel", "tests/test_disk.py::test_a_disk_that_is_full_or_read_only"),
    Fault("runtime/points.py", "return apart.index(min(apart))", "return 0", "other sizes all go to the first point", "tests/test_onnx.py::test_several_tuned_points"),
    Fault("capture/separate.py", "d % rank != 0", "d != 0", "a softmax over the batch, counted from the end, is taken apart", "tests/test_separate.py::test_who_can_run_alone"),
    Fault("compiler.py", "if plan.apart and not separate(network.captured):", "if False:", "a plan may take images apart that are not", "tests/test_separate.py::test_a_plan_cannot_take_images_apart_that_are_not"),
    Fault("runtime/module.py", "for i in range(images)", "for i in range(images)[:1]", "only the first image of a batch is run", "tests/test_separate.py::test_the_same_answers"),
    Fault("pruning/prune.py", "held.mask.copy_(kept & held.mask)", "held.mask.copy_(kept)", "what was pruned may come back", "tests/test_pruning.py::test_masks_hold_through_training"),
    Fault("pruning/masks.py", "kept[order[gone]] = False", "kept[order[~gone]] = False", "the most important weights go", "tests/test_pruning.py::test_as_much_as_asked"),
    Fault("tune/search.py", "return timing.ratio_p25 > KEEP", "return timing.ratio_p50 > 0.9", "a slower candidate is kept", "tests/test_search.py::test_keep_or_drop"),
    Fault("methods/dense.py", "return F.pad(x, (left, right, top, bottom)), (0, 0)", "return F.pad(x, (right, left, top, bottom)), (0, 0)", "uneven padding is mirrored", "tests/test_dense.py::test_without_a_private_op_the_plain_form_remains"),
    Fault(SUMS, "return np.repeat(value, 2) if summed == \"f16\" else value", "return value", "fp16 nonzeros stand once where they are read as pairs", "tests/test_neon.py::test_a_sample_runs_right_under_qemu"),
    Fault(SUMS, "[n for n in sizes if nonzeros * n <= HALF_ROW * conv.k * own] or sizes[:1]", "sizes", "rows of any length are summed in fp16", "tests/test_half.py::test_only_short_rows_are_summed_in_fp16"),
    Fault("codegen/copy.py", "e.narrow(e.widen(value, code.reads, \"f32\", 0), code.writes, 0)", "e.narrow(e.widen(value, code.reads, \"f32\", 0), code.writes, 0) if code.reads != \"bf16\" else ir.Constant(kind, None)", "bf16 maps are zero for torch", "tests/test_half.py::test_a_network_in_half_is_one_segment"),
    Fault("capture/half.py", "outputs = work.wanted(graph.outputs)", "outputs = graph.outputs", "answers come back in half precision", "tests/test_half.py::test_a_network_in_half_is_one_segment"),
    Fault("capture/half.py", "if changed not in self.known:", "if True:", "a value is cast once for each reader", "tests/test_half.py::test_inputs_outputs_and_what_torch_keeps"),
    Fault("capture/half.py", "work.add(node, (node.layer or node.name) not in half.stay)", "work.add(node, True)", "layers that must stay f32 do not", "tests/test_half.py::test_a_layer_that_overflows_stays_f32_by_name"),
    Fault("tune/error.py", "if not lost <= allowed:", "if not lost <= 1e3 * allowed:", "layers may lose a thousand times as much", "tests/test_half.py::test_a_network_in_half_is_one_segment"),
    Fault("runtime/stays.py", "and parts[node.name][0] not in changed", "", "a piece is cut out of a map that stands nowhere", "tests/test_half.py::test_pieces_of_a_cast"),
    Fault(REFERENCE, "gamma(count, summed) * size", "1e3 * gamma(count, summed) * size", "the bound of fp16 sums is a thousand times too wide", "tests/test_reference.py::test_bound_of_fp16_sums_is_by_block"),
    Fault("runtime/container.py", "if digest != _digest(metadata, tensors):", "if False:", "damaged files are let in", "tests/test_hostile.py::test_every_flip_and_every_cut"),
    Fault("capture/onnx_file.py", "and path.is_relative_to(folder)", "", "a link leads out of the model's folder", "tests/test_hostile.py::test_hostile_onnx_under_limits"),
    Fault("capture/onnx_operators.py", "and maker.args == (own,)", "", "any gate is taken for SiLU", "tests/test_onnx.py::test_a_gate_of_another_value_is_no_silu"),
    Fault("capture/onnx_quantized.py", "if r.file.readers(a[\"first\"]) != {\"DequantizeLinear\"}:", "if False:", "integers that someone reads are none", "tests/test_onnx.py::test_operators_by_onnx_own_tests"),
    Fault("runtime/module.py", "if value != example:", "if False:", "a number that was built in is not looked at", "tests/test_compile.py::test_numbers_beside_tensors_are_fixed"),
    Fault("saved.py", "    _runs(network)\n", "", "a graph that makes no sense is let in", "tests/test_saved.py::test_a_graph_that_makes_no_sense_is_refused"),
    Fault(REFERENCE, "i * dh : i * dh + (p - 1) * u + 1 : u", "i : i + (p - 1) * u + 1 : u", "the oracle forgets dilation", "tests/test_reference.py::test_reference_is_torch_in_float64"),
    Fault(REFERENCE, "return np.where(v < 0, 0.0, np.where(v > 6, 6.0, v))", "return np.where(v < 0, 0.0, v)", "the oracle's ReLU6 has no 6", "tests/test_reference.py::test_activations_are_torchs"),
    Fault(REFERENCE, "error = gamma(roundings, \"f32\") * (total", "error = 1e3 * gamma(roundings, \"f32\") * (total", "the bound is a thousand times too wide", "tests/test_reference.py::test_bound_is_the_papers_formula"),
)  # fmt: skip


def run(fault: Fault) -> str | None:
    """Who caught the fault, or None."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for folder_name in ("tests", "benchmarks"):
            shutil.copytree(ROOT / folder_name, copy / folder_name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        target = copy / "src" / "aerogel" / fault.file
        text = target.read_text()
        assert text.count(fault.find) == 1, f"{fault.file}: '{fault.find}' stands there {text.count(fault.find)} times"
        target.write_text(text.replace(fault.find, fault.put))
        environment = os.environ | {"PYTHONPATH": str(copy / "src"), "AEROGEL_CACHE": str(CACHE), "OMP_NUM_THREADS": "1"}
        if fault.caught_by != SUITE:
            command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--quick", fault.caught_by]
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=300)
            named = re.findall(r"^(?:FAILED|ERROR) (\S+?)(?:\[| |$)", done.stdout.decode(errors="replace"), re.MULTILINE)
            return (named or [fault.caught_by])[0] if done.returncode == 1 or done.returncode < 0 else None
        method = METHOD.get(fault.file, "direct")
        for kind, count, threads in (*(IDLE if method == "actsparse" else ()), *SWEEPS):
            command = [
                sys.executable,
                "-m",
                "tests.suite",
                "--method",
                method,
                "--kind",
                kind,
                "--count",
                str(count),
                "--threads",
                threads,
                "--stop",
                "1",
            ]
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=300)
            if done.returncode:
                return f"{kind} x {threads} ({'failed' if done.returncode > 0 else f'signal {-done.returncode}'})"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", type=int, help="the number of one fault")
    only = parser.parse_args().only
    chosen = list(enumerate(FAULTS)) if only is None else [(only, FAULTS[only])]
    survivors = 0
    with ThreadPoolExecutor(2) as pool:
        for (number, fault), caught in zip(chosen, pool.map(run, [f for _, f in chosen]), strict=True):
            survivors += caught is None
            print(f"{number:2d} {fault.why}: {'SURVIVED' if caught is None else 'caught by ' + caught}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} faults caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

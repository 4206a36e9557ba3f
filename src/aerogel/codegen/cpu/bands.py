"""`bands`: a convolution and the pooling after it, band by band, so that the convolution's output never
leaves the cache (PECR).

    for each unit of this thread        an image, a band of `pooled` rows of the pooled output
      first = the band's first row of the convolution, moved up where the image ends before the band does
      convolution of `band_rows` rows from there  ->  scratch   the kernel of any method, with its epilogue
      pooling of scratch                          ->  y         the kernel of `pool`, told which of its rows
                                                                are the image's

Both are other kernels' code, called with their arguments copied and a few slots changed: nothing here knows
what they compute.
"""

from __future__ import annotations

from llvmlite import ir

from aerogel.codegen.cpu import abi, pool
from aerogel.codegen.cpu.emit import I64, PTR, VOID, Emit, Value

POINTERS = (*abi.POINTERS, "conv_arguments", "pool_arguments")
SIZES = (
    "conv_entry",
    "pool_entry",
    "conv_words",
    "pool_words",  # slots of their arguments
    "images",
    "bands",
    "pooled",
    "band_rows",  # rows of a band: of the pooled output, and of the convolution
    "conv_rows",
    "stride",
    "top",  # the convolution's rows, and the pooling's stride and padding of rows
    "x_image",
    "x_row",  # bytes from one image, and from one row of the convolution, to the next in x
    "y_image",
    "y_row",
    "y_rows",
    "y_pitch",
    "plane_elements",
    "front_elements",
    # bytes: both kernels' scratch comes first, then the band, then arguments
    "band_first",
    "arguments_first",
    "scratch_thread",
)
ARGUMENTS = POINTERS + SIZES
ENTRY = "bands"


def emit() -> str:
    """LLVM IR of `void bands(int64 *arguments, int64 thread, int64 threads)`."""
    module = ir.Module(name="bands")
    e = Emit.start(module, ENTRY, [PTR, I64, I64])
    b, (block, thread, threads) = e.b, e.function.args
    a = e.slots(block, ARGUMENTS, POINTERS)
    own = e.at(a["scratch"], b.mul(thread, a["scratch_thread"]))
    band, arguments = e.at(own, a["band_first"]), e.at(own, a["arguments_first"])

    def call(name: str, changed: dict[int, Value]) -> None:
        def copy(i: Value, _: list[Value]) -> None:
            word = e.load(b.gep(a[f"{name}_arguments"], [i], source_etype=I64), I64, 8)
            b.store(word, b.gep(arguments, [i], source_etype=I64), align=8)

        e.loop(I64(0), a[f"{name}_words"], copy)
        for slot, value in changed.items():
            place = b.gep(arguments, [I64(slot)], source_etype=I64)
            b.store(b.ptrtoint(value, I64) if value.type == PTR else value, place, align=8)
        signature = ir.FunctionType(VOID, [PTR, I64, I64])
        b.call(b.inttoptr(a[f"{name}_entry"], signature.as_pointer()), [arguments, I64(0), I64(1)])

    def unit(u: Value) -> None:
        image, number = b.sdiv(u, a["bands"]), b.srem(u, a["bands"])
        row = b.mul(number, a["pooled"])
        wanted, last = b.sub(b.mul(row, a["stride"]), a["top"]), b.sub(a["conv_rows"], a["band_rows"])
        first = b.select(b.icmp_signed("<", wanted, I64(0)), I64(0), wanted)
        first = b.select(b.icmp_signed("<", first, last), first, last)
        x = e.at(a["x"], b.add(b.mul(image, a["x_image"]), b.mul(first, a["x_row"])))
        slots = {name: i for i, name in enumerate(abi.POINTERS)}
        call("conv", {slots["x"]: x, slots["y"]: band, slots["bias"]: a["bias"], slots["scratch"]: own})
        rest = b.sub(a["y_rows"], row)
        final = b.icmp_signed("<=", rest, a["pooled"])
        rows = b.select(final, rest, a["pooled"])
        done = b.mul(row, a["y_pitch"])
        changed = {
            "x": band,
            "y": e.at(a["y"], b.add(b.mul(image, a["y_image"]), b.mul(row, a["y_row"]))),
            "scratch": own,
            "y_rows": rows,
            "top": b.sub(first, wanted),
            "plane_elements": b.select(final, b.sub(a["plane_elements"], done), b.mul(rows, a["y_pitch"])),
            "front_elements": b.select(b.icmp_signed("==", u, I64(0)), a["front_elements"], I64(0)),
        }
        call("pool", {pool.ARGUMENTS.index(name): value for name, value in changed.items()})

    e.share(b.mul(a["images"], a["bands"]), thread, threads, unit)
    b.ret_void()
    return str(module)

"""`gathered` and `leftovers` in Triton: all tiles of a layer in one launch, by tl.dot on tensor cores (matrix
cores on AMD).

    gathered    a program has BLOCK_M pixels, of all images one after another, and a panel: BLOCK_N
                filters that keep the same positions. For each BLOCK_K positions it reads
                a[m, k] = x[pixel m + offset k], zero where the tap is outside of the image, and adds
                a . value[k, n] to its sums. No im2col is written anywhere. Epilogue, y; or the sums alone.
    leftovers   nonzeros outside of the tiles: a program has BLOCK_M pixels and 32 filters of similar
                lengths, each with positions of its own; sums[m, n] += value[n] * x[pixel m + offset n].
                It adds to what gathered left, then epilogue, y.

x and y are channels_last, so that a pixel's gathered channels lie within a few cache lines. Whether a tap is
inside is a bit of a word that is made once for each pixel. Sums are f32. Imported only where Triton is (`pip
install aerogel[triton]`).
"""

import triton
import triton.language as tl


@triton.jit
def pixels_of(
    block,
    pixels,
    columns,
    plane,
    height,
    width,
    channels,
    top,
    left,
    BLOCK_M: tl.constexpr,
    U: tl.constexpr,
    V: tl.constexpr,
):
    """A block's pixels: which (those past the end are the last), the first row and column each reads, and
    where that is in x."""
    m = tl.minimum(block * BLOCK_M + tl.arange(0, BLOCK_M), pixels - 1)
    image = m // plane
    h = (m - image * plane) // columns * U - top
    w = (m - image * plane) % columns * V - left
    return m, h, w, ((image * height + h) * width + w) * channels


@triton.jit
def taps_inside(
    h,
    w,
    height,
    width,
    BLOCK_M: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    BORDER: tl.constexpr,
):
    """For each pixel a bit for each tap that is inside of the image; nobody asks where there is no BORDER."""
    bits = tl.zeros((BLOCK_M,), tl.int64 if R * S > 31 else tl.int32)
    for t in tl.static_range(R * S if BORDER else 0):
        row, column = h + t // S * DH, w + t % S * DW
        bits |= ((row >= 0) & (row < height) & (column >= 0) & (column < width)).to(bits.dtype) << t
    return bits


@triton.jit
def windows(x, base, offset, tap, bits, k, end, BORDER: tl.constexpr):
    """a[m, k]: what each pixel has at these positions, nothing at those past the end."""
    real = (k < end)[None, :] & (base == base)[:, None]
    if BORDER:
        real = real & (((bits[:, None] >> tl.load(tap + k)[None, :]) & 1) != 0)
    return tl.load(x + (base[:, None] + tl.load(offset + k)[None, :]), mask=real, other=0.0)


@triton.jit
def finished(
    sums,
    m,
    own,
    there,
    bias,
    residual,
    parameter,
    filters,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    KIND: tl.constexpr,
):
    """The epilogue. ADD: no residual, before the activation, after it. NaN goes through, as in torch."""
    if BIAS:
        sums += tl.load(bias + own, mask=own >= 0, other=0.0)[None, :]
    if ADD == "before":
        sums += tl.load(residual + m[:, None] * filters + own[None, :], mask=there, other=0.0).to(tl.float32)
    if KIND == "relu":
        sums = tl.where(sums < 0, 0.0, sums)
    elif KIND == "relu6":
        sums = tl.where(sums < 0, 0.0, tl.where(sums > 6, 6.0, sums))
    elif KIND == "leaky_relu":
        sums = tl.where(sums > 0, sums, sums * parameter)
    elif KIND == "threshold":
        sums = tl.where(sums <= parameter, 0.0, sums)
    elif KIND == "silu":
        t = tl.exp(tl.where(sums < 0, sums, -sums))
        sums = tl.where(sums < 0, sums * t, sums) / (1 + t)
    elif KIND == "hardswish":
        gate = sums + 3
        sums = sums * (tl.where(gate < 0, 0.0, tl.where(gate > 6, 6.0, gate)) * (1.0 / 6.0))
    elif KIND == "hardsigmoid":
        gate = sums * (1.0 / 6.0) + 0.5
        sums = tl.where(gate < 0, 0.0, tl.where(gate > 1, 1.0, gate))
    elif KIND == "sigmoid":
        t = tl.exp(tl.where(sums < 0, sums, -sums))
        sums = tl.where(sums < 0, t, 1.0) / (1 + t)
    elif KIND == "gelu":  # Abramowitz and Stegun, 7.1.26
        s = 1 / (1 + 0.23164190 * tl.where(sums < 0, -sums, sums))
        p = (((0.5307027145 * s - 0.7265760135) * s + 0.7107068705) * s - 0.142248368) * s + 0.127414796
        tail = p * s * tl.exp(-0.5 * sums * sums)
        sums = sums * tl.where(sums < 0, tail, 1 - tail)
    if ADD == "after":
        sums += tl.load(residual + m[:, None] * filters + own[None, :], mask=there, other=0.0).to(tl.float32)
    return sums


@triton.jit
def gathered(
    x,
    y,
    bias,
    residual,
    member,
    panel_at,
    offset,
    tap,
    value,
    parameter,
    pixels,
    columns,
    plane,
    height,
    width,
    channels,
    filters,
    top,
    left,
    panels,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    U: tl.constexpr,
    V: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    BORDER: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    KIND: tl.constexpr,
):
    block, panel = tl.program_id(0) // panels, tl.program_id(0) % panels
    m, h, w, base = pixels_of(
        block, pixels, columns, plane, height, width, channels, top, left, BLOCK_M, U, V
    )
    bits = taps_inside(h, w, height, width, BLOCK_M, R, S, DH, DW, BORDER)
    n, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    begin, end = tl.load(panel_at + panel * 3), tl.load(panel_at + panel * 3 + 1)
    values = (
        value + tl.load(panel_at + panel * 3 + 2).to(tl.int64) * BLOCK_N + k[:, None] * BLOCK_N + n[None, :]
    )
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    a = windows(x, base, offset, tap, bits, begin + k, end, BORDER)
    for i in range(begin, end, BLOCK_K):
        # on its way while tensor cores work
        following = windows(x, base, offset, tap, bits, i + BLOCK_K + k, end, BORDER)
        sums = tl.dot(a, tl.load(values), sums, input_precision="tf32")
        a = following
        values += BLOCK_K * BLOCK_N
    own = tl.load(member + panel * BLOCK_N + n)
    there = (block * BLOCK_M + tl.arange(0, BLOCK_M) < pixels)[:, None] & (own >= 0)[None, :]
    sums = finished(sums, m, own, there, bias, residual, parameter, filters, BIAS, ADD, KIND)
    tl.store(y + m[:, None] * filters + own[None, :], sums.to(y.dtype.element_ty), mask=there)


@triton.jit
def leftovers(
    x,
    y,
    bias,
    residual,
    partial,
    filter,
    slot,
    offset,
    tap,
    value,
    parameter,
    pixels,
    columns,
    plane,
    height,
    width,
    channels,
    filters,
    top,
    left,
    groups,
    BLOCK_M: tl.constexpr,
    LANES: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    U: tl.constexpr,
    V: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    BORDER: tl.constexpr,
    PARTIAL: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    KIND: tl.constexpr,
):
    block, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    m, h, w, base = pixels_of(
        block, pixels, columns, plane, height, width, channels, top, left, BLOCK_M, U, V
    )
    bits = taps_inside(h, w, height, width, BLOCK_M, R, S, DH, DW, BORDER)
    n = tl.arange(0, LANES)
    sums = tl.zeros((BLOCK_M, LANES), tl.float32)
    for i in range(tl.load(slot + group), tl.load(slot + group + 1)):
        v = tl.load(value + i * LANES + n).to(tl.float32)
        real = (v != 0)[None, :] & (base == base)[:, None]
        if BORDER:
            real = real & (((bits[:, None] >> tl.load(tap + i * LANES + n)[None, :]) & 1) != 0)
        found = tl.load(x + (base[:, None] + tl.load(offset + i * LANES + n)[None, :]), mask=real, other=0.0)
        sums += found.to(tl.float32) * v[None, :]
    own = tl.load(filter + group * LANES + n)
    there = (block * BLOCK_M + tl.arange(0, BLOCK_M) < pixels)[:, None] & (own >= 0)[None, :]
    if PARTIAL:
        sums += tl.load(partial + m[:, None] * filters + own[None, :], mask=there, other=0.0)
    sums = finished(sums, m, own, there, bias, residual, parameter, filters, BIAS, ADD, KIND)
    tl.store(y + m[:, None] * filters + own[None, :], sums.to(y.dtype.element_ty), mask=there)

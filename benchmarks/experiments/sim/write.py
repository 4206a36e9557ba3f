r"""One layer as a single .cu file: the kernel, the packed data, a check on the CPU and a main(). No Python
needed to run it.

    python -m benchmarks.experiments.sim.write n1c32h28w28k32r3s3u1p1+bias+relu \
        --method stridepack --sparsity 0.9 -o layer.cu
    python -m benchmarks.experiments.sim.write CONV --method direct --config direct/filters=2,... -o layer.cu
    nvcc -arch=sm_75 -o layer layer.cu && ./layer
        prints the largest error and microseconds; exit code 1 if it is wrong

Methods are those of aerogel.methods.gpu that are not in Triton, `baked` (stridepack with the weights in the
code), `lists` (actsparse that skips single zeros), `pooled` (actsparse with a 2x2 maximum after it) and
`dense`, the fair opponent (opponent.py). Half of x is zero. A problem in f16 (n1c32...:f16 with sums in f32,
:f16.f16.f16.f16 in f16 within a stage) is written for direct and stridepack. Kept to what CUDA 11 and
compute_70 accept, so that GPGPU-Sim can run it. Nothing here was run on a GPU; nvcc compiles one of each in
the tests.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from aerogel.codegen.gpu.launch import Launch, dialect
from aerogel.ir import NUMPY, Array, Config, Conv, Dtypes, Gpu, Idle, Pool, Stats
from aerogel.methods import gpu_form
from aerogel.methods.actsparse import gpu as actsparse
from benchmarks.experiments.sim.opponent import opponent

KINDS = ("direct", "stridepack", "baked", "dense", "actsparse", "lists", "pooled")
POOL = Pool("max", (2, 2), (2, 2), (0, 0), (1, 1))
TARGET = Gpu("cuda", "sm_70", 80, 98304)
_NUMBERS = {np.int32: "int", np.int64: "LONG", np.float32: "float"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("conv")
    parser.add_argument("--method", choices=KINDS, default="direct")
    parser.add_argument("--config", help="as explain() writes it; the method's first if left out")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("-o", "--out", type=Path, required=True)
    given = parser.parse_args()
    conv = Conv.parse(given.conv)
    weight = np.random.default_rng(0).standard_normal(conv.weight_shape).astype(np.float32)
    weight *= np.random.default_rng(1).random(conv.weight_shape) >= given.sparsity
    weight = weight.astype(NUMPY[conv.dtypes.weight])
    given.out.write_text(
        source(conv, weight, given.method, None if given.config is None else Config.parse(given.config))
    )


def source(conv: Conv, weight: Array, kind: str, config: Config | None = None) -> str:
    """The whole file."""
    launches, last = launches_of(conv, weight, kind, config)
    arrays, calls, kernels = list[str](), list[str](), list[str]()
    for number, launch in enumerate(launches):
        given = []
        for i, argument in enumerate(launch.arguments):
            if isinstance(argument, np.ndarray):
                arrays.append(_array(f"own_{number}_{i}", argument))
                given.append(f"({_pointer(launch, i)})own_{number}_{i}_on")
            elif isinstance(argument, str):
                given.append(f"({_pointer(launch, i)}){argument}_on")
            else:
                given.append(f"({_NUMBERS[type(argument)]}){argument!s}")
        block = f"dim3({launch.code.block[0]}, {launch.code.block[1]})"
        calls.append(f"    {launch.code.entry}<<<dim3{launch.grid}, {block}>>>({', '.join(given)});")
        kernels.append(launch.code.body())
    names = [
        f"own_{n}_{i}"
        for n, one in enumerate(launches)
        for i, a in enumerate(one.arguments)
        if isinstance(a, np.ndarray)
    ]
    filters, position = np.nonzero(weight.reshape(conv.k, -1))
    arrays += [
        _array("kept_filter", filters.astype(np.int32)),
        _array("kept_position", position.astype(np.int32)),
    ]
    arrays.append(_array("kept_value", weight.reshape(conv.k, -1)[filters, position].astype(np.float32)))
    pooled, half = POOL if kind == "pooled" else None, conv.dtypes != Dtypes()
    y_rows, y_columns = conv.out if pooled is None else pooled.out(*conv.out)
    sizes = {
        "N": conv.batch, "C": conv.c, "H": conv.size[0], "W": conv.size[1], "K": conv.k, "P": conv.out[0],
        "Q": conv.out[1], "R": conv.r, "S": conv.s, "U": conv.stride[0], "V": conv.stride[1], "TOP":
        conv.pad[0], "LEFT": conv.pad[1], "DH": conv.dilation[0], "DW": conv.dilation[1], "GROUPS":
        conv.groups, "LAST": int(last), "YP": y_rows, "YQ": y_columns, "WINDOW": 1 if pooled is None else
        pooled.window[0], "HALVES": int(half), "BLOCKS": int(max(np.prod(one.grid) for one in launches)),
        "SCRATCH": max(4, *(one.scratch_bytes for one in launches)),
    }  # fmt: skip
    check = "".join(
        {"bias": "v += bias_[k];", "add": "v += residual_[at];"}.get(s, f"v = after_{s}(v);")
        for s in conv.steps
    )
    text = _MAIN.replace("@UPLOADS", "\n".join(f"    UPLOAD({name});" for name in names)).replace(
        "@CALLS", "\n".join(calls)
    )
    text = text.replace("@CHECK", check).replace("@PARAMETER", repr(float(np.float32(conv.parameter))))
    enums = "enum { " + ", ".join(f"{n}_ = {v}" for n, v in sizes.items()) + " };\n"
    head = (
        f"/* {conv} as {kind}: written by benchmarks/experiments/sim/write.py. */\n#include <cmath>\n"
        "#include <cstdio>\n#include <vector>\n"
    )
    return "".join([head, dialect(), *kernels, *arrays, enums, text])


def launches_of(
    conv: Conv, weight: Array, kind: str, config: Config | None, target: Gpu = TARGET
) -> tuple[list[Launch], bool]:
    """The launches, and whether maps are channels_last."""
    if kind == "dense":
        return [opponent(conv, weight)], True
    own = gpu_form({"pooled": "actsparse", "lists": "actsparse", "baked": "stridepack"}.get(kind, kind))
    wanted = {"baked": kind == "baked", "lists": kind == "lists"}
    offered = [
        c
        for c in own.configs(conv, target, Stats.of(weight, Idle(50, 30, 20)))
        if all(dict(c.options).get(name, value) == value for name, value in wanted.items())
    ]
    chosen = config or offered[0]
    packed = own.pack(weight, conv, chosen)
    launches = (
        own.build(packed, conv, chosen) if kind != "pooled" else actsparse.build(packed, conv, chosen, POOL)
    )
    return launches, own.layout(chosen) == "channels_last"


def _pointer(launch: Launch, number: int) -> str:
    """The type that the kernel takes: found in its source."""
    text = launch.code.text()
    inside = (
        text[text.index(f"\n{launch.code.entry}(") :].partition("(")[2].partition(")")[0].split(",")[number]
    )
    return " ".join(word for word in inside.replace("*RESTRICT", "* ").split()[:-1] if word != "GLOBAL")


def _array(name: str, array: Array) -> str:
    """Bits as text: floats come back exactly."""
    bits = np.ascontiguousarray(array).reshape(-1)
    words = bits.view(np.uint32) if bits.dtype.itemsize == 4 else bits.view(np.uint16)
    kind = "unsigned" if bits.dtype.itemsize == 4 else "unsigned short"
    lines = [", ".join(hex(v) for v in words[i : i + 16].tolist()) for i in range(0, max(1, len(words)), 16)]
    return f"static const {kind} {name}[] = {{\n" + (",\n".join(lines) or "0") + "\n};\n"


_MAIN = """
#define UPLOAD(name) \\
    void *name##_on; \\
    CALL(cudaMalloc(&name##_on, sizeof(name))); \\
    CALL(cudaMemcpy(name##_on, name, sizeof(name), cudaMemcpyHostToDevice))
#define CALL(what) \\
    if ((what) != cudaSuccess) { \\
        printf("failed: %s\\\\n", #what); \\
        return 1; \\
    }

static float noise(unsigned n)
{
    n = (n ^ 61) ^ (n >> 16);
    n *= 9;
    n = (n ^ (n >> 4)) * 0x27d4eb2d;
    n ^= n >> 15;
    return (float)(n & 0xffff) / 32768.0f - 1.0f;
}
static float as_number(unsigned bits)
{
    float v;
    __builtin_memcpy(&v, &bits, 4);
    return v;
}
static unsigned short to_half(float v) /* to nearest, ties to even; not for numbers beyond f16 */
{
    unsigned bits, sign, rest;
    __builtin_memcpy(&bits, &v, 4);
    sign = bits >> 16 & 0x8000u;
    float size = std::fabs(v);
    if (size < 6.103515625e-05f) return (unsigned short)(sign | (unsigned)std::nearbyint(size * 16777216.0f));
    __builtin_memcpy(&bits, &size, 4);
    bits -= 112u << 23;
    rest = bits & 0x1fffu;
    bits >>= 13;
    bits += rest > 0x1000u || (rest == 0x1000u && (bits & 1u));
    return (unsigned short)(sign | bits);
}
static float from_half(unsigned short h)
{
    int exponent = h >> 10 & 31;
    float size = exponent ? std::ldexp((float)((h & 1023) | 1024), exponent - 25)
                          : std::ldexp((float)(h & 1023), -24);
    return h & 0x8000 ? -size : size;
}
/* Numbers as the device has them, and as floats again. */
static std::vector<unsigned short> halves(std::vector<float> &v)
{
    std::vector<unsigned short> found(v.size());
    for (size_t i = 0; i < v.size(); ++i) v[i] = from_half(found[i] = to_half(v[i]));
    return found;
}
static double after_relu(double v) { return v < 0 ? 0 : v; }
static double after_relu6(double v) { return v < 0 ? 0 : v > 6 ? 6 : v; }
static double after_leaky(double v) { return v > 0 ? v : v * @PARAMETER; }
static double after_above(double v) { return v <= @PARAMETER ? 0 : v; }
static double after_silu(double v) { return v / (1 + std::exp(-v)); }
static double after_hardswish(double v) { return v * (v < -3 ? 0 : v > 3 ? 6 : v + 3) / 6; }
static long at(long n, long c, long h, long w, long cs, long hs, long ws)
{
    return LAST_ ? ((n * hs + h) * ws + w) * cs + c : ((n * cs + c) * hs + h) * ws + w;
}
static long x_at(long n, long c, long h, long w) { return at(n, c, h, w, C_, H_, W_); }
static long y_at(long n, long k, long p, long q) { return at(n, k, p, q, K_, P_, Q_); }
static long pooled_at(long n, long k, long p, long q) { return at(n, k, p, q, K_, YP_, YQ_); }

int main()
{
    std::vector<float> x((size_t)N_ * C_ * H_ * W_), y((size_t)N_ * K_ * YP_ * YQ_), bias_(K_);
    std::vector<float> residual_((size_t)N_ * K_ * P_ * Q_);
    for (size_t i = 0; i < x.size(); ++i)
        x[i] = std::fmax(noise((unsigned)i), 0.0f); /* half of it zero, as after a ReLU */
    for (size_t i = 0; i < bias_.size(); ++i) bias_[i] = noise(7u + (unsigned)i);
    for (size_t i = 0; i < residual_.size(); ++i) residual_[i] = noise(99u + (unsigned)i);
    void *x_on, *y_on, *bias_on, *residual_on, *scratch_on, *counts_on;
    std::vector<unsigned short> x16, residual16, y16(y.size());
    if (HALVES_) {
        x16 = halves(x);
        residual16 = halves(residual_);
    }
    const size_t item = HALVES_ ? 2 : 4;
    CALL(cudaMalloc(&x_on, x.size() * item));
    CALL(cudaMalloc(&y_on, y.size() * item));
    CALL(cudaMalloc(&bias_on, bias_.size() * 4));
    CALL(cudaMalloc(&residual_on, residual_.size() * item));
    CALL(cudaMalloc(&scratch_on, SCRATCH_));
    CALL(cudaMalloc(&counts_on, BLOCKS_ * 4));
    CALL(cudaMemcpy(x_on, HALVES_ ? (void *)x16.data() : (void *)x.data(), x.size() * item,
                    cudaMemcpyHostToDevice));
    CALL(cudaMemcpy(bias_on, bias_.data(), bias_.size() * 4, cudaMemcpyHostToDevice));
    CALL(cudaMemcpy(residual_on, HALVES_ ? (void *)residual16.data() : (void *)residual_.data(),
                    residual_.size() * item, cudaMemcpyHostToDevice));
@UPLOADS
    cudaEvent_t began, ended;
    CALL(cudaEventCreate(&began));
    CALL(cudaEventCreate(&ended));
    CALL(cudaEventRecord(began));
@CALLS
    CALL(cudaGetLastError());
    CALL(cudaEventRecord(ended));
    CALL(cudaEventSynchronize(ended));
    float ms = 0;
    CALL(cudaEventElapsedTime(&ms, began, ended));
    CALL(cudaMemcpy(HALVES_ ? (void *)y16.data() : (void *)y.data(), y_on, y.size() * item,
                    cudaMemcpyDeviceToHost));
    for (size_t i = 0; HALVES_ && i < y.size(); ++i) y[i] = from_half(y16[i]);
    std::vector<double> wanted(residual_.size(), 0.0), size(residual_.size(), 0.0);
    for (size_t j = 0; j < sizeof(kept_value) / 4; ++j) {
        long k = kept_filter[j], tap = kept_position[j], s = tap % S_, r = tap / S_ % R_;
        long c = tap / S_ / R_ + k / (K_ / GROUPS_) * (C_ / GROUPS_);
        for (long n = 0; n < N_; ++n)
            for (long p = 0; p < P_; ++p)
                for (long q = 0; q < Q_; ++q) {
                    long h = p * U_ + r * DH_ - TOP_, w = q * V_ + s * DW_ - LEFT_;
                    if (h < 0 || h >= H_ || w < 0 || w >= W_) continue;
                    double product = (double)as_number(kept_value[j]) * x[x_at(n, c, h, w)];
                    wanted[y_at(n, k, p, q)] += product;
                    size[y_at(n, k, p, q)] += std::fabs(product);
                }
    }
    double worst = 0;
    for (long n = 0; n < N_; ++n)
        for (long k = 0; k < K_; ++k)
            for (long p = 0; p < P_; ++p)
                for (long q = 0; q < Q_; ++q) {
                    long at = y_at(n, k, p, q);
                    double v = wanted[at];
                    @CHECK
                    wanted[at] = v;
                }
    for (long n = 0; n < N_; ++n)
        for (long k = 0; k < K_; ++k)
            for (long p = 0; p < YP_; ++p)
                for (long q = 0; q < YQ_; ++q) {
                    double v = -INFINITY, sums = 0;
                    for (long i = 0; i < WINDOW_; ++i)
                        for (long j = 0; j < WINDOW_; ++j) {
                            long at = y_at(n, k, p * WINDOW_ + i, q * WINDOW_ + j);
                            v = std::fmax(v, wanted[at]);
                            sums = std::fmax(sums, size[at]);
                        }
                    double error = std::fabs(v - y[pooled_at(n, k, p, q)]) / (1 + sums);
                    worst = error > worst || error != error ? error : worst;
                }
    printf("largest error %g of the sums' size, %g us\\\\n", worst, ms * 1000);
    return worst <= (HALVES_ ? 1e-2 : 1e-5) ? 0 : 1;
}
"""


if __name__ == "__main__":
    main()

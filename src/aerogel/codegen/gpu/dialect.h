/* One source for three compilers: CUDA C++ (NVRTC, nvcc; CUDA 11 and compute_70 are enough), OpenCL C, and clang for amdgcn, which
   has OpenCL's language but no library. A kernel is written as

       KERNEL(width, height) name(GLOBAL const float *RESTRICT x, ...) { SHARED float tile[N]; ... BARRIER(); ... }

   with blocks of width x height threads, and compiled with its sizes as macros. */
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

#define KERNEL(width, height) extern "C" __global__ void __launch_bounds__((width) * (height), 1)
#define GLOBAL
#define SHARED __shared__
#define LOCAL
#define DEVICE static __device__ __forceinline__
#define RESTRICT __restrict__
#define BARRIER() __syncthreads()
#define THREAD_X ((int)threadIdx.x)
#define THREAD_Y ((int)threadIdx.y)
#define BLOCK_X ((int)blockIdx.x)
#define BLOCK_Y ((int)blockIdx.y)
#define BLOCK_Z ((int)blockIdx.z)
#define READ(pointer) __ldg(pointer)
#define FMA(a, b, c) fmaf(a, b, c)
#define EXP(v) expf(v)
#define AS_FLOAT(bits) __int_as_float(bits)
#define AS_INT(v) __float_as_int(v)
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define LEAST(a, b) min(a, b)
#define COUNT_BITS(bits) __popc(bits)
#define HELD(pointer) asm("" : "+l"(pointer)) /* not to be computed again from its parts for every load */
#define INFINITE __int_as_float(0x7f800000)
typedef long long LONG;
/* Bit i of `bits` is what thread i of this row of 32 says. */
typedef unsigned VOTES;
#define VOTE(votes, mine, bits) bits = __ballot_sync(0xffffffffu, mine)

#else

#define KERNEL(width, height) __kernel __attribute__((reqd_work_group_size(width, height, 1))) void
#define GLOBAL __global
#define SHARED __local
#define LOCAL __local
#define DEVICE static inline
#define RESTRICT restrict
#define READ(pointer) (*(pointer))
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
typedef long LONG;
#define HELD(pointer)
/* Through shared memory, and all rows of the block together: OpenCL 1.2 has no votes of a row. */
typedef struct { unsigned char of[32]; } VOTES;
#define VOTE(votes, mine, bits) \
    BARRIER(); \
    (votes).of[THREAD_X] = (unsigned char)(mine); \
    BARRIER(); \
    bits = 0; \
    for (int lane = 0; lane < 32; ++lane) bits |= (unsigned)(votes).of[lane] << lane

#ifdef __AMDGCN__
typedef __attribute__((ext_vector_type(2))) int int2;
typedef __attribute__((ext_vector_type(4))) float float4;
typedef __attribute__((ext_vector_type(4))) unsigned uint4;
typedef __attribute__((ext_vector_type(4))) unsigned short ushort4;
#define BARRIER() (__builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "workgroup"), __builtin_amdgcn_s_barrier())
#define THREAD_X ((int)__builtin_amdgcn_workitem_id_x())
#define THREAD_Y ((int)__builtin_amdgcn_workitem_id_y())
#define BLOCK_X ((int)__builtin_amdgcn_workgroup_id_x())
#define BLOCK_Y ((int)__builtin_amdgcn_workgroup_id_y())
#define BLOCK_Z ((int)__builtin_amdgcn_workgroup_id_z())
#define FMA(a, b, c) __builtin_fmaf(a, b, c)
#define EXP(v) __builtin_amdgcn_exp2f(1.44269504f * (v))
#define AS_FLOAT(bits) __builtin_bit_cast(float, bits)
#define AS_INT(v) __builtin_bit_cast(int, v)
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
#define COUNT_BITS(bits) __builtin_popcount(bits)
#define INFINITE __builtin_inff()
#else
#define BARRIER() barrier(CLK_LOCAL_MEM_FENCE)
#define THREAD_X ((int)get_local_id(0))
#define THREAD_Y ((int)get_local_id(1))
#define BLOCK_X ((int)get_group_id(0))
#define BLOCK_Y ((int)get_group_id(1))
#define BLOCK_Z ((int)get_group_id(2))
#define FMA(a, b, c) fma(a, b, c)
#define EXP(v) exp(v)
#define AS_FLOAT(bits) as_float(bits)
#define AS_INT(v) as_int(v)
#define LEAST(a, b) min(a, b)
#define COUNT_BITS(bits) ((int)popcount(bits))
#define INFINITE INFINITY
#endif
#endif

/* From global to shared memory, 16 bytes or 4 at a time, zeros where there is nothing to read. From sm_80 on without a register in
   between (cp.async): the copy is done when COPIED() returns in every thread and a barrier has passed. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
DEVICE void copy_bytes16(float *to, const float *from, int there)
{
    unsigned at = (unsigned)__cvta_generic_to_shared(to);
    int bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes));
}
DEVICE void copy_bytes4(float *to, const float *from, int there)
{
    unsigned at = (unsigned)__cvta_generic_to_shared(to);
    int bytes = there ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(from), "r"(bytes));
}
#define COPIED() asm volatile("cp.async.wait_all;" ::: "memory")
#else
DEVICE void copy_bytes16(LOCAL float *to, GLOBAL const float *from, int there)
{
    float4 zero;
    zero.x = zero.y = zero.z = zero.w = 0.0f;
    *(LOCAL float4 *)to = there ? *(GLOBAL const float4 *)from : zero;
}
DEVICE void copy_bytes4(LOCAL float *to, GLOBAL const float *from, int there)
{
    *to = there ? *from : 0.0f;
}
#define COPIED()
#endif

/* Two f16 in 32 bits. Where a compiler has no f16 arithmetic (OpenCL 1.2) it is emulated: computed in f32 and rounded. */
typedef unsigned HALF2;
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
DEVICE float half_number(unsigned short bits)
{
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(bits));
    return v;
}
DEVICE unsigned short half_bits(float v)
{
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
    return bits;
}
DEVICE HALF2 half_fma(HALF2 a, HALF2 b, HALF2 c)
{
    HALF2 d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
#elif defined(__AMDGCN__)
typedef __attribute__((ext_vector_type(2))) _Float16 HALVES;
DEVICE float half_number(unsigned short bits) { return (float)__builtin_bit_cast(_Float16, bits); }
DEVICE unsigned short half_bits(float v) { return __builtin_bit_cast(unsigned short, (_Float16)v); }
DEVICE HALF2 half_fma(HALF2 a, HALF2 b, HALF2 c)
{
    HALVES d = __builtin_elementwise_fma(__builtin_bit_cast(HALVES, a), __builtin_bit_cast(HALVES, b), __builtin_bit_cast(HALVES, c));
    return __builtin_bit_cast(HALF2, d);
}
#else
DEVICE float half_number(unsigned short bits) { return vload_half(0, (const __private half *)&bits); }
DEVICE unsigned short half_bits(float v)
{
    unsigned short bits;
    vstore_half_rte(v, 0, (__private half *)&bits);
    return bits;
}
DEVICE HALF2 half_fma(HALF2 a, HALF2 b, HALF2 c)
{
    float first = fma(half_number((unsigned short)a), half_number((unsigned short)b), half_number((unsigned short)c));
    float second = fma(half_number((unsigned short)(a >> 16)), half_number((unsigned short)(b >> 16)), half_number((unsigned short)(c >> 16)));
    return half_bits(first) | (HALF2)half_bits(second) << 16;
}
#endif
DEVICE float half_first(HALF2 v) { return half_number((unsigned short)v); }
DEVICE float half_second(HALF2 v) { return half_number((unsigned short)(v >> 16)); }

/* What is applied to a finished sum; NaN goes through, as in torch. FINISH is made of these. */
DEVICE float relu(float v) { return v < 0.0f ? 0.0f : v; }
DEVICE float relu6(float v) { return v < 0.0f ? 0.0f : v > 6.0f ? 6.0f : v; }
DEVICE float leaky_relu(float v, float slope) { return v > 0.0f ? v : v * slope; }
DEVICE float threshold(float v, float limit) { return v <= limit ? 0.0f : v; }
DEVICE float silu(float v)
{
    float t = EXP(v < 0.0f ? v : -v);
    return (v < 0.0f ? v * t : v) / (1.0f + t);
}
DEVICE float sigmoid(float v)
{
    float t = EXP(v < 0.0f ? v : -v);
    return (v < 0.0f ? t : 1.0f) / (1.0f + t);
}
/* Abramowitz and Stegun, 7.1.26: to 1.5e-7 of v */
DEVICE float gelu(float v)
{
    float s = 1.0f / (1.0f + 0.23164190f * (v < 0.0f ? -v : v));
    float p = (((0.5307027145f * s - 0.7265760135f) * s + 0.7107068705f) * s - 0.142248368f) * s + 0.127414796f;
    float tail = p * s * EXP(-0.5f * v * v);
    return v * (v < 0.0f ? tail : 1.0f - tail);
}
DEVICE float hardsigmoid(float v)
{
    float gate = v * (1.0f / 6.0f) + 0.5f;
    return gate < 0.0f ? 0.0f : gate > 1.0f ? 1.0f : gate;
}
DEVICE float hardswish(float v)
{
    float gate = v + 3.0f;
    gate = gate < 0.0f ? 0.0f : gate > 6.0f ? 6.0f : gate;
    return v * (gate * (1.0f / 6.0f));
}

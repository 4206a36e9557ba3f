/* What maps hold: f32, or with HALF f16, two pixels of one map in a WORD of 32 bits that lie some rows apart. Weights are then held twice,
   so that one instruction multiplies both pixels. With SUMS16 sums within a stage are f16, too (f16x2 arithmetic); between stages, and
   without it always, they are f32. */
#undef WORD
#undef STORED
#undef TWO
#undef LOAD
#undef STORE
#undef MAC
#undef AS_WORD
#undef WORD4
#if HALF
#define WORD HALF2
#define WORD4 uint4
#define AS_WORD(bits) ((HALF2)(bits))
#define STORED unsigned short
#define TWO 2
#define LOAD(pointer) half_number(READ(pointer))
#define STORE(to, v) to = half_bits(v)
#if SUMS16
#define MAC(w, v, sum, part) part = half_fma(w, v, part)
#else
#define MAC(w, v, sum, part) \
    { \
        sum[0] = FMA(half_first(w), half_first(v), sum[0]); \
        sum[1] = FMA(half_first(w), half_second(v), sum[1]); \
    }
#endif
#else
#define WORD float
#define WORD4 float4
#define AS_WORD(bits) AS_FLOAT(bits)
#define STORED float
#define TWO 1
#define LOAD(pointer) READ(pointer)
#define STORE(to, v) to = v
#define MAC(w, v, sum, part) sum[0] = FMA(w, v, sum[0])
#endif
#undef FLUSH
#if HALF && SUMS16
#define FLUSH(sum, part) \
    { \
        sum[0] += half_first(part); \
        sum[1] += half_second(part); \
        part = 0; \
    }
#else
#define FLUSH(sum, part) {}
#endif

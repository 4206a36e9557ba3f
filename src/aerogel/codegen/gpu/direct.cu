/* direct (Escort): each nonzero is one load of x through the read-only cache and one FMA for every pixel and image of a thread.

   A block has ROWS rows of PIXELS threads; a row works on one filter at a time, FILTERS of them in turn, a thread on PER pixels below
   each other of IMAGES images: ROW_STEP words apart, which is known when compiled, so that they share one address. Nonzeros, (offset of
   the window in x, value), are sorted by tap: `start` has where those of each filter and tap begin. What is outside of x is known for a
   whole tap (CHECKED) and read as 0, so nothing is copied into a border first. Filters are in `filter`, longest first, so that rows of
   a block have about as much to do. Of f16 (element.h) x is such a copy; a pixel is two, `apart` rows of y below each other, and after
   CHUNK nonzeros sums go to f32. */
#if CHECKED
#define INSIDE(t) there[t]
#else
#define INSIDE(t) 1
#endif

KERNEL(PIXELS, ROWS)
direct(GLOBAL const WORD *RESTRICT x, GLOBAL STORED *RESTRICT y, GLOBAL const float *RESTRICT bias,
       GLOBAL const STORED *RESTRICT residual, GLOBAL const int *RESTRICT filter, GLOBAL const int *RESTRICT start,
       GLOBAL const int2 *RESTRICT entry, float parameter, int images, int filters, int height, int width, int rows, int columns,
       int top, int left, int apart, int image_words)
{
    int spot = BLOCK_X * PIXELS + THREAD_X, group = spot / columns, q = spot - group * columns, p = group * PER;
    int h0 = p * STRIDE_P - top, w0 = q * STRIDE_Q - left;
    if (p >= apart) return;
    GLOBAL const WORD *image[IMAGES];
    UNROLL for (int i = 0; i < IMAGES; ++i) {
        image[i] = x + (LONG)LEAST(BLOCK_Z * IMAGES + i, images - 1) * image_words + (h0 * width + w0);
        HELD(image[i]);
    }
    for (int f = 0; f < FILTERS; ++f) {
        int slot = (BLOCK_Y * FILTERS + f) * ROWS + THREAD_Y;
        if (slot >= filters) break;
        float sum[IMAGES][PER][TWO];
        WORD part[IMAGES][PER];
        UNROLL for (int i = 0; i < IMAGES; ++i) UNROLL for (int t = 0; t < PER; ++t) {
            UNROLL for (int two = 0; two < TWO; ++two) sum[i][t][two] = 0.0f;
            part[i][t] = 0;
        }
        for (int r = 0; r < TAPS_R; ++r) for (int s = 0; s < TAPS_S; ++s) {
            int tap = (slot * TAPS_R + r) * TAPS_S + s, number = READ(start + tap), last = READ(start + tap + 1);
#if CHECKED
            int there[PER], h = h0 + r * DILATION_P, w = w0 + s * DILATION_Q;
            UNROLL for (int t = 0; t < PER; ++t)
                there[t] = w >= 0 && w < width && h + t * STRIDE_P >= 0 && h + t * STRIDE_P < height;
#endif
            while (number < last) {
                int stop = LEAST(last, number + CHUNK);
                for (; number < stop; ++number) {
                    int2 one = READ(entry + number);
                    WORD value = AS_WORD(one.y);
                    UNROLL for (int i = 0; i < IMAGES; ++i) UNROLL for (int t = 0; t < PER; ++t) {
                        WORD v = 0;
                        if (INSIDE(t)) v = READ(image[i] + one.x + t * ROW_STEP);
                        MAC(value, v, sum[i][t], part[i][t]);
                    }
                }
                UNROLL for (int i = 0; i < IMAGES; ++i) UNROLL for (int t = 0; t < PER; ++t) FLUSH(sum[i][t], part[i][t])
            }
        }
        int own = READ(filter + slot);
        UNROLL for (int i = 0; i < IMAGES; ++i) UNROLL for (int t = 0; t < PER; ++t) UNROLL for (int two = 0; two < TWO; ++two) {
            int row = p + t + two * apart, number = BLOCK_Z * IMAGES + i;
            if (p + t < apart && row < rows && number < images) {
                LONG at = (((LONG)number * filters + own) * rows + row) * columns + q;
                float v = sum[i][t][two];
                FINISH(v, own, at);
                STORE(y[at], v);
            }
        }
    }
}

/* direct (Escort): each nonzero is one load of x through the read-only cache and one FMA for every pixel and image of a thread.

   A block has ROWS rows of PIXELS threads; a row works on one filter at a time, FILTERS of them in turn, a thread on PER pixels of
   IMAGES images. Nonzeros, (offset in padded x, value), come through shared memory in chunks of CHUNK for each row. Filters are in
   `filter`, longest first, so that rows of a block have about as much to do and the first has most. Of f16 (element.h) a pixel is two,
   `pixels` outputs apart, and chunks are the stages after which sums go to f32. */
KERNEL(PIXELS, ROWS)
direct(GLOBAL const WORD *RESTRICT x, GLOBAL STORED *RESTRICT y, GLOBAL const float *RESTRICT bias,
       GLOBAL const STORED *RESTRICT residual, GLOBAL const int *RESTRICT filter, GLOBAL const int *RESTRICT start,
       GLOBAL const int2 *RESTRICT entry, float parameter, int images, int filters, int pixels, int columns, int row_step,
       int column_step, int outputs, LONG image_step)
{
    SHARED int2 staged[ROWS][CHUNK];
    int place[PER];
    GLOBAL const WORD *image[IMAGES];
    UNROLL for (int t = 0; t < PER; ++t) {
        int pixel = LEAST((BLOCK_X * PER + t) * PIXELS + THREAD_X, pixels - 1);
        int p = pixel / columns;
        place[t] = p * row_step + (pixel - p * columns) * column_step;
    }
    UNROLL for (int i = 0; i < IMAGES; ++i) {
        image[i] = x + LEAST(BLOCK_Z * IMAGES + i, images - 1) * image_step;
        HELD(image[i]);
    }
    for (int f = 0; f < FILTERS; ++f) {
        int head = (BLOCK_Y * FILTERS + f) * ROWS;
        if (head >= filters) break;
        int slot = LEAST(head + THREAD_Y, filters - 1);
        int first = start[slot], last = start[slot + 1], longest = start[head + 1] - start[head];
        float sum[IMAGES][PER][TWO];
        WORD part[IMAGES][PER];
        UNROLL for (int i = 0; i < IMAGES; ++i) UNROLL for (int t = 0; t < PER; ++t) {
            UNROLL for (int two = 0; two < TWO; ++two) sum[i][t][two] = 0.0f;
            part[i][t] = 0;
        }
        for (int done = 0; done < longest; done += CHUNK) {
            int count = LEAST(CHUNK, last - first - done);
            BARRIER();
            for (int j = THREAD_X; j < count; j += PIXELS) staged[THREAD_Y][j] = entry[first + done + j];
            BARRIER();
            for (int j = 0; j < count; ++j) {
                int2 one = staged[THREAD_Y][j];
                WORD value = AS_WORD(one.y);
                UNROLL for (int i = 0; i < IMAGES; ++i) UNROLL for (int t = 0; t < PER; ++t) {
                    WORD v = READ(image[i] + (one.x + place[t]));
                    MAC(value, v, sum[i][t], part[i][t]);
                }
            }
            UNROLL for (int i = 0; i < IMAGES; ++i) UNROLL for (int t = 0; t < PER; ++t) FLUSH(sum[i][t], part[i][t])
        }
        int own = filter[slot];
        UNROLL for (int i = 0; i < IMAGES; ++i) UNROLL for (int t = 0; t < PER; ++t) UNROLL for (int two = 0; two < TWO; ++two) {
            int pixel = (BLOCK_X * PER + t) * PIXELS + THREAD_X, output = pixel + two * pixels, number = BLOCK_Z * IMAGES + i;
            if (pixel < pixels && output < outputs && number < images && head + THREAD_Y < filters) {
                LONG at = ((LONG)number * filters + own) * outputs + output;
                float v = sum[i][t][two];
                FINISH(v, own, at);
                STORE(y[at], v);
            }
        }
    }
}

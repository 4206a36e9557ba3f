/* direct (Escort): each nonzero is one load of x through the read-only cache and one FMA for every pixel and image of a thread.

   A block has ROWS rows of PIXELS threads; a row works on one filter at a time, FILTERS of them in turn, a thread on PER pixels of
   IMAGES images. Nonzeros, (offset in padded x, value), come through shared memory in chunks of CHUNK for each row. Filters are in
   `filter`, longest first, so that rows of a block have about as much to do and the first has most. */
KERNEL(PIXELS, ROWS)
direct(GLOBAL const float *RESTRICT x, GLOBAL float *RESTRICT y, GLOBAL const float *RESTRICT bias,
       GLOBAL const float *RESTRICT residual, GLOBAL const int *RESTRICT filter, GLOBAL const int *RESTRICT start,
       GLOBAL const int2 *RESTRICT entry, float parameter, int images, int filters, int pixels, int columns, int row_step,
       int column_step, LONG image_step)
{
    SHARED int2 staged[ROWS][CHUNK];
    int place[PER];
    GLOBAL const float *image[IMAGES];
    UNROLL for (int t = 0; t < PER; ++t) {
        int pixel = LEAST((BLOCK_X * PER + t) * PIXELS + THREAD_X, pixels - 1);
        int p = pixel / columns;
        place[t] = p * row_step + (pixel - p * columns) * column_step;
    }
    UNROLL for (int i = 0; i < IMAGES; ++i) image[i] = x + LEAST(BLOCK_Z * IMAGES + i, images - 1) * image_step;
    for (int f = 0; f < FILTERS; ++f) {
        int head = (BLOCK_Y * FILTERS + f) * ROWS;
        if (head >= filters) break;
        int slot = LEAST(head + THREAD_Y, filters - 1);
        int first = start[slot], last = start[slot + 1], longest = start[head + 1] - start[head];
        float sum[IMAGES][PER];
        UNROLL for (int i = 0; i < IMAGES; ++i) UNROLL for (int t = 0; t < PER; ++t) sum[i][t] = 0.0f;
        for (int done = 0; done < longest; done += CHUNK) {
            int count = LEAST(CHUNK, last - first - done);
            BARRIER();
            for (int j = THREAD_X; j < count; j += PIXELS) staged[THREAD_Y][j] = entry[first + done + j];
            BARRIER();
            for (int j = 0; j < count; ++j) {
                int2 one = staged[THREAD_Y][j];
                float value = AS_FLOAT(one.y);
                UNROLL for (int i = 0; i < IMAGES; ++i) UNROLL for (int t = 0; t < PER; ++t)
                    sum[i][t] = FMA(value, READ(image[i] + one.x + place[t]), sum[i][t]);
            }
        }
        int own = filter[slot];
        UNROLL for (int i = 0; i < IMAGES; ++i) UNROLL for (int t = 0; t < PER; ++t) {
            int pixel = (BLOCK_X * PER + t) * PIXELS + THREAD_X, number = BLOCK_Z * IMAGES + i;
            if (pixel < pixels && number < images && head + THREAD_Y < filters) {
                LONG at = ((LONG)number * filters + own) * pixels + pixel;
                float v = sum[i][t];
                FINISH(v, own, at);
                y[at] = v;
            }
        }
    }
}

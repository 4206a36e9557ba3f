/* A tile of x in shared memory as [row][column][channel], TILE_H x TILE_W pixels of PITCH floats, TILE_C channels at a time.

   x is channels_last, (n, h, w, c). A thread keeps its part of the channels, WIDE of them, and goes from pixel to pixel without a
   division. Wanted besides: THREADS of a block, STRIDE_P and STRIDE_Q, COPY (copy_bytes16 or copy_bytes4). */
#define PARTS (TILE_C / WIDE)
#define AT_ONCE (THREADS / PARTS)
#define TILE_FLOATS (TILE_H * TILE_W * PITCH)

/* Channels [channel, end) of the tile whose first output is (row0, column0), into `into`; zeros outside of the image. */
DEVICE void stage(LOCAL float *into, GLOBAL const float *image, int thread, int channel, int end, int channels, int height, int width,
                  int h0, int w0)
{
    int part = thread % PARTS * WIDE, pixel = thread / PARTS, r = pixel / TILE_W, s = pixel % TILE_W;
    channel += part;
    for (; pixel < TILE_H * TILE_W; pixel += AT_ONCE) {
        int h = h0 + r, w = w0 + s;
        int there = channel < end && h >= 0 && h < height && w >= 0 && w < width;
        COPY(into + pixel * PITCH + part, image + (there ? ((LONG)h * width + w) * channels + channel : 0), there);
        r += AT_ONCE / TILE_W;
        s += AT_ONCE % TILE_W;
        if (s >= TILE_W) {
            s -= TILE_W;
            ++r;
        }
    }
}

/* What a thread holds, sum[TILE_P][TILE_Q] of filter `own` from output (row0 + own_p, column0 + own_q) on, finished and stored. */
#define STORE_SUMS() \
    { \
    UNROLL for (int i = 0; i < TILE_P; ++i) UNROLL for (int j = 0; j < TILE_Q; ++j) { \
        int p = row0 + own_p + i, q = column0 + own_q + j; \
        if (p < rows && q < columns) { \
            LONG at = (((LONG)BLOCK_Z * rows + p) * columns + q) * filters + own; \
            float v = sum[i][j]; \
            FINISH(v, own, at); \
            y[at] = v; \
        } \
    } \
    }

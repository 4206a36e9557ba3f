/* A tile of x in shared memory as [row][column][channel], TILE_H x TILE_W pixels of PITCH words, TILE_C channels at a time.

   x is channels_last, (n, h, w, c). A thread keeps its part of the channels, WIDE of them, and goes from pixel to pixel without a
   division. Wanted besides: THREADS of a block, STRIDE_P and STRIDE_Q, COPY (copy_bytes16 or copy_bytes4), and of f16 (element.h) APART:
   a word's second pixel is so many rows of x below its first. */
#define PARTS (TILE_C / WIDE)
#define AT_ONCE (THREADS / PARTS)
#define TILE_FLOATS (TILE_H * TILE_W * PITCH)

#if HALF
/* WIDE channels of two pixels, interleaved. */
DEVICE void stage_pair(LOCAL WORD *into, GLOBAL const STORED *from, GLOBAL const STORED *other, int there, int also)
{
#if WIDE == 4
    ushort4 a = *(GLOBAL const ushort4 *)from, b = *(GLOBAL const ushort4 *)other;
    uint4 both;
    both.x = (there ? a.x : 0u) | (also ? (unsigned)b.x << 16 : 0u);
    both.y = (there ? a.y : 0u) | (also ? (unsigned)b.y << 16 : 0u);
    both.z = (there ? a.z : 0u) | (also ? (unsigned)b.z << 16 : 0u);
    both.w = (there ? a.w : 0u) | (also ? (unsigned)b.w << 16 : 0u);
    *(LOCAL uint4 *)into = both;
#else
    *into = (there ? *from : 0u) | (also ? (unsigned)*other << 16 : 0u);
#endif
}
#endif

/* Channels [channel, end) of the tile whose first output is (row0, column0), into `into`; zeros outside of the image, which has less than
   2^31 elements. */
DEVICE void stage(LOCAL WORD *into, GLOBAL const STORED *image, int thread, int channel, int end, int channels, int height, int width,
                  int h0, int w0)
{
    int part = thread % PARTS * WIDE, pixel = thread / PARTS, h = h0 + pixel / TILE_W, w = w0 + pixel % TILE_W;
    int at = (h * width + w) * channels + channel + part, over = w0 + TILE_W;
    int step = (AT_ONCE / TILE_W * width + AT_ONCE % TILE_W) * channels, wrap = (width - TILE_W) * channels;
    int real = channel + part < end;
    into += pixel * PITCH + part;
    for (; pixel < TILE_H * TILE_W; pixel += AT_ONCE) {
        int across = real && (unsigned)w < (unsigned)width, there = across && (unsigned)h < (unsigned)height;
        GLOBAL const STORED *from = image + (there ? at : 0);
#if HALF
        int also = across && (unsigned)(h + APART) < (unsigned)height;
        GLOBAL const STORED *other = image + (also ? at + APART * width * channels : 0);
        stage_pair(into, from, other, there, also);
#else
        COPY(into, from, there);
#endif
        into += AT_ONCE * PITCH;
        at += step;
        h += AT_ONCE / TILE_W;
        w += AT_ONCE % TILE_W;
        if (w >= over) {
            w -= TILE_W;
            at += wrap;
            ++h;
        }
    }
}

/* What a thread holds, sum[TILE_P][TILE_Q][TWO] of filter `own` from output (row0 + own_p, column0 + own_q) on, finished and stored;
   of two pixels the second is half of the block's rows below. */
#define STORE_SUMS() \
    { \
    LONG corner_at = (LONG)BLOCK_Z * rows * columns * filters + ((row0 + own_p) * columns + column0 + own_q) * filters + own; \
    GLOBAL STORED *into = y + corner_at; \
    GLOBAL const STORED *beside = residual + corner_at; \
    HELD(into); \
    HELD(beside); \
    { \
    GLOBAL const STORED *residual = beside; \
    int left_rows = rows - row0 - own_p, left_columns = columns - column0 - own_q; \
    UNROLL for (int i = 0; i < TILE_P; ++i) UNROLL for (int j = 0; j < TILE_Q; ++j) UNROLL for (int two = 0; two < TWO; ++two) { \
        int below = i + two * (WARPS_P * TILE_P); \
        if (below < left_rows && j < left_columns) { \
            int at = (below * columns + j) * filters; \
            float v = sum[i][j][two]; \
            FINISH(v, own, at); \
            STORE(into[at], v); \
        } \
    } \
    } \
    }

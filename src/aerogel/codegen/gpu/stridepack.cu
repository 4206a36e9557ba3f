/* stridepack (Tetris): a lane is a filter, a thread holds TILE_P x TILE_Q outputs of it in registers, and x is staged in shared memory
   (stage.h), so that lanes read different channels and each weight is used TILE_P * TILE_Q times.

   A block has WARPS_P x WARPS_Q warps beside each other in the image, all with the same 32 filters. For each unit, (group of filters,
   stage of channels), `first` says where its slots begin: four slots of 32 lanes at a time, values as float4 and places in the tile
   as ushort4, so that loads are wide and coalesced. Padding is a weight of 0 that reads one of the
   words between a pixel's channels and the next pixel's, which are kept 0: it changes no sum, whatever x holds, and no lane branches. The
   next four slots are fetched while these are used. y is channels_last, too: lanes store
   beside each other. With two BUFFERS the next stage is on its way while this one is used. Where all channels are one stage, a block takes
   DEEP groups of filters in turn and stages x once for them; its warps then wait for nobody. */
#undef SLOT
#define SLOT(w, o) \
    { \
        LOCAL const WORD *seen = from + (int)(o); \
        UNROLL for (int i = 0; i < TILE_P; ++i) UNROLL for (int j = 0; j < TILE_Q; ++j) \
            MAC(w, seen[(i * STRIDE_P * TILE_W + j * STRIDE_Q) * PITCH], sum[i][j], part[i][j]); \
    }

/* All slots of a unit, from a tile. */
#undef SLOTS
#define SLOTS(tile_at, unit) \
    { \
        LOCAL const WORD *from = (tile_at) + base; \
        int four = first[unit], last = first[(unit) + 1]; \
        WORD4 v = value[four * 32 + THREAD_X]; \
        ushort4 o = place[four * 32 + THREAD_X]; \
        for (; four < last; ++four) { \
            WORD4 next_v = value[(four + 1) * 32 + THREAD_X]; /* there is one more than all */ \
            ushort4 next_o = place[(four + 1) * 32 + THREAD_X]; \
            SLOT(v.x, o.x) \
            SLOT(v.y, o.y) \
            SLOT(v.z, o.z) \
            SLOT(v.w, o.w) \
            v = next_v; \
            o = next_o; \
        } \
        UNROLL for (int i = 0; i < TILE_P; ++i) UNROLL for (int j = 0; j < TILE_Q; ++j) FLUSH(sum[i][j], part[i][j]) \
    }
#undef CLEAR
#define CLEAR() \
    UNROLL for (int i = 0; i < TILE_P; ++i) UNROLL for (int j = 0; j < TILE_Q; ++j) { \
        UNROLL for (int two = 0; two < TWO; ++two) sum[i][j][two] = 0.0f; \
        part[i][j] = 0; \
    }

KERNEL(32, WARPS_P *WARPS_Q)
stridepack(GLOBAL const STORED *RESTRICT x, GLOBAL STORED *RESTRICT y, GLOBAL const float *RESTRICT bias,
           GLOBAL const STORED *RESTRICT residual, GLOBAL const int *RESTRICT filter, GLOBAL const int *RESTRICT first,
           GLOBAL const WORD4 *RESTRICT value, GLOBAL const ushort4 *RESTRICT place, float parameter, int channels, int height,
           int width, int filters, int rows, int columns, int top, int left, int tiles_across, int stages, int group_channels,
           int groups_of_32)
{
    SHARED WORD tile[BUFFERS][TILE_FLOATS];
    int thread = THREAD_Y * 32 + THREAD_X, tile_p = BLOCK_X / tiles_across, tile_q = BLOCK_X - tile_p * tiles_across;
    int row0 = tile_p * (WARPS_P * TILE_P * TWO), column0 = tile_q * (WARPS_Q * TILE_Q);
    int h0 = row0 * STRIDE_P - top, w0 = column0 * STRIDE_Q - left;
    int blocks_deep = (groups_of_32 + DEEP - 1) / DEEP, part_of = GROUPED ? BLOCK_Y / blocks_deep : 0;
    int begin = part_of * group_channels, end = begin + group_channels;
    int own_p = THREAD_Y / WARPS_Q * TILE_P, own_q = THREAD_Y % WARPS_Q * TILE_Q;
    int base = (own_p * STRIDE_P * TILE_W + own_q * STRIDE_Q) * PITCH;
    GLOBAL const STORED *image = x + (LONG)BLOCK_Z * height * width * channels;
    HELD(image);
    float sum[TILE_P][TILE_Q][TWO];
    WORD part[TILE_P][TILE_Q];
    for (int i = thread; i < BUFFERS * TILE_H * TILE_W; i += THREADS)
        UNROLL for (int j = TILE_C; j < PITCH; ++j) (&tile[0][0])[i * PITCH + j] = 0;
#if DEEP > 1
    stage(tile[0], image, thread, begin, end, channels, height, width, h0, w0);
    COPIED();
    BARRIER();
    int low = (BLOCK_Y - part_of * blocks_deep) * DEEP, high = LEAST(low + DEEP, groups_of_32);
    ROLLED for (; low < high; ++low) {
        int group = part_of * groups_of_32 + low;
        CLEAR()
        SLOTS(tile[0], group)
        int own = filter[group * 32 + THREAD_X];
        if (own >= 0) STORE_SUMS()
    }
#else
    CLEAR()
    if (BUFFERS == 2) stage(tile[0], image, thread, begin, end, channels, height, width, h0, w0);
    for (int number = 0; number < stages; ++number) {
        if (BUFFERS == 1) { /* no barrier may depend on `number`: PoCL loses its way */
            BARRIER();
            stage(tile[0], image, thread, begin + number * TILE_C, end, channels, height, width, h0, w0);
        }
        COPIED();
        BARRIER();
        if (BUFFERS == 2 && number + 1 < stages)
            stage(tile[(number + 1) % BUFFERS], image, thread, begin + (number + 1) * TILE_C, end, channels, height, width, h0, w0);
        SLOTS(tile[number % BUFFERS], BLOCK_Y * stages + number)
    }
    int own = filter[BLOCK_Y * 32 + THREAD_X];
    if (own >= 0) STORE_SUMS()
#endif
}

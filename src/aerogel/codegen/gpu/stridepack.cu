/* stridepack (Tetris): a lane is a filter, a thread holds TILE_P x TILE_Q outputs of it in registers, and x is staged in shared memory
   (stage.h), so that lanes read different channels and each weight is used TILE_P * TILE_Q times.

   A block has WARPS_P x WARPS_Q warps beside each other in the image, all with the same 32 filters. For each unit, (group of filters,
   stage of channels), `first` says where its slots begin: four slots of 32 lanes at a time, values as float4 and places in the tile
   as ushort4, so that loads are wide and coalesced. A value of 0 is padding and reads nothing. y is channels_last, too: lanes store
   beside each other. With two BUFFERS the next stage is on its way while this one is used. */
#define SLOT(w, o)                                                                                                      \
    if ((w) != 0) {                                                                                                     \
        UNROLL for (int i = 0; i < TILE_P; ++i) UNROLL for (int j = 0; j < TILE_Q; ++j) {                               \
            WORD seen = from[(int)(o) + (i * STRIDE_P * TILE_W + j * STRIDE_Q) * PITCH];                                \
            MAC(w, seen, sum[i][j], part[i][j]);                                                                        \
        }                                                                                                               \
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
    int begin = BLOCK_Y / groups_of_32 * group_channels, end = begin + group_channels;
    int own_p = THREAD_Y / WARPS_Q * TILE_P, own_q = THREAD_Y % WARPS_Q * TILE_Q;
    int base = (own_p * STRIDE_P * TILE_W + own_q * STRIDE_Q) * PITCH;
    GLOBAL const STORED *image = x + (LONG)BLOCK_Z * height * width * channels;
    float sum[TILE_P][TILE_Q][TWO];
    WORD part[TILE_P][TILE_Q];
    UNROLL for (int i = 0; i < TILE_P; ++i) UNROLL for (int j = 0; j < TILE_Q; ++j) {
        UNROLL for (int two = 0; two < TWO; ++two) sum[i][j][two] = 0.0f;
        part[i][j] = 0;
    }
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
        LOCAL const WORD *from = tile[number % BUFFERS] + base;
        int unit = BLOCK_Y * stages + number, last = first[unit + 1];
        for (int four = first[unit]; four < last; ++four) {
            WORD4 v = value[four * 32 + THREAD_X];
            ushort4 o = place[four * 32 + THREAD_X];
            SLOT(v.x, o.x)
            SLOT(v.y, o.y)
            SLOT(v.z, o.z)
            SLOT(v.w, o.w)
        }
        UNROLL for (int i = 0; i < TILE_P; ++i) UNROLL for (int j = 0; j < TILE_Q; ++j) FLUSH(sum[i][j], part[i][j])
    }
    int own = filter[BLOCK_Y * 32 + THREAD_X];
    if (own >= 0) STORE_SUMS()
}

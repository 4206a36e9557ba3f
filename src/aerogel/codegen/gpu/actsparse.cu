/* actsparse (TACO'23): zeros of the feature map are skipped, not zeros of the weights. A lane has FILTERS filters and a warp one patch of
   TILE_P x TILE_Q outputs, so what a warp reads of x is the same for all of its lanes, and skipping it costs no lane anything.

   For each stage of channels the tile of x is staged (stage.h). Of the positions (c, r, s) at which this group of filters has weights,
   each warp lists those where its patch sees anything but zeros (ECR's compaction, 32 positions at a time, in their order); then it goes
   through the list: one load of weights for each, used TILE_P * TILE_Q times.

   With LISTS single zeros are skipped, as ECR does: of each pixel of the tile one warp lists the channels of the stage that are not zero,
   with their values, once for all warps, filters and taps. A warp then goes through the lists of the pixels under each of its outputs:
   one load of weights for each value, used for FILTERS filters. There is no tile then, and every position has weights.

   `counts` gets for each block how many positions its first warp found active: whether skipping still pays is seen from them.

   With POOL (1 maximum, 2 average; PECR) a warp owns POOLED_P x POOLED_Q outputs of the pooling and computes the patch under them:
   what the convolution gives is never stored. */
#undef AHEAD
#undef LIST_VALUES
#undef WEIGHTS
#undef USE
#define WARPS (WARPS_P * WARPS_Q)
#define AHEAD 4 /* pixels whose values a warp has asked for before it lists the first */

/* The lists of TILE_C channels from `channel` on, of all pixels of the tile; what is outside of the image has none. */
#define LIST_VALUES(channel) \
    for (int low = 0; low < TILE_H * TILE_W; low += WARPS * AHEAD) { \
        float seen[AHEAD][TILE_C / 32]; \
        UNROLL for (int i = 0; i < AHEAD; ++i) { \
            int pixel = low + i * WARPS + THREAD_Y, h = row0 * STRIDE_P - top + pixel / TILE_W, w = column0 * STRIDE_Q - left + pixel % TILE_W; \
            int there = pixel < TILE_H * TILE_W && h >= 0 && h < height && w >= 0 && w < width; \
            GLOBAL const float *at = image + (there ? (h * width + w) * channels : 0); \
            UNROLL for (int part = 0; part < TILE_C / 32; ++part) { \
                int mine = (channel) + part * 32 + THREAD_X; \
                seen[i][part] = 0.0f; \
                if (there && mine < end) seen[i][part] = READ(at + mine); \
            } \
        } \
        UNROLL for (int i = 0; i < AHEAD; ++i) { \
            int pixel = low + i * WARPS + THREAD_Y, found = 0; \
            UNROLL for (int part = 0; part < TILE_C / 32; ++part) { \
                unsigned bits; \
                VOTE(votes[THREAD_Y], seen[i][part] != 0.0f, bits); \
                if (seen[i][part] != 0.0f) { \
                    int2 entry; \
                    entry.x = AS_INT(seen[i][part]); \
                    entry.y = (part * 32 + THREAD_X) * (TAPS_R * TAPS_S * 32 * FILTERS); \
                    list[pixel * TILE_C + found + COUNT_BITS(bits & ((1u << THREAD_X) - 1u))] = entry; \
                } \
                found += COUNT_BITS(bits); \
            } \
            if (THREAD_X == 0 && pixel < TILE_H * TILE_W) length[pixel] = found; \
        } \
    }

/* A lane's weights of one position. */
#if FILTERS == 4
#define WEIGHTS(w, from) \
    { \
        float4 four = READ((GLOBAL const float4 *)(from)); \
        w[0] = four.x; \
        w[1] = four.y; \
        w[2] = four.z; \
        w[3] = four.w; \
    }
#else
#define WEIGHTS(w, from) UNROLL for (int f = 0; f < FILTERS; ++f) w[f] = READ((from) + f);
#endif

/* One value of a list, for all filters of a lane. */
#define USE(number, p, q) \
    { \
        int2 entry = list[number]; \
        float w[FILTERS]; \
        WEIGHTS(w, weight + entry.y) \
        UNROLL for (int f = 0; f < FILTERS; ++f) sum[f][p][q] = FMA(w[f], AS_FLOAT(entry.x), sum[f][p][q]); \
    }

KERNEL(32, WARPS_P *WARPS_Q)
actsparse(GLOBAL const float *RESTRICT x, GLOBAL float *RESTRICT y, GLOBAL const float *RESTRICT bias,
          GLOBAL const float *RESTRICT residual, GLOBAL int *RESTRICT counts, GLOBAL const int *RESTRICT first, GLOBAL const unsigned short *RESTRICT place,
          GLOBAL const float *RESTRICT value, float parameter, int channels, int height, int width, int filters, int rows, int columns,
          int top, int left, int tiles_across, int stages, int group_channels, int group_filters, int groups_of_lanes, int y_rows,
          int y_columns, int pool_top, int pool_left, int tiles, int groups)
{
#if LISTS
    SHARED int2 list[TILE_H * TILE_W * TILE_C]; /* a value's bits, and where its weights begin */
    SHARED int length[TILE_H * TILE_W];
#else
    SHARED float tile[TILE_FLOATS];
    SHARED unsigned short active[WARPS][MOST];
#endif
    SHARED VOTES votes[WARPS];
    int thread = THREAD_Y * 32 + THREAD_X, tile_p = BLOCK_X / tiles_across, tile_q = BLOCK_X - tile_p * tiles_across;
    int row0 = tile_p * (WARPS_P * STEP_P) - pool_top, column0 = tile_q * (WARPS_Q * STEP_Q) - pool_left;
    int begin = BLOCK_Y / groups_of_lanes * group_channels, end = begin + group_channels;
    int own_p = THREAD_Y / WARPS_Q * STEP_P, own_q = THREAD_Y % WARPS_Q * STEP_Q;
    int corner = own_p * STRIDE_P * TILE_W + own_q * STRIDE_Q;
    GLOBAL const float *image = x + (LONG)BLOCK_Z * height * width * channels;
    float sum[FILTERS][TILE_P][TILE_Q];
    UNROLL for (int f = 0; f < FILTERS; ++f) UNROLL for (int i = 0; i < TILE_P; ++i) UNROLL for (int j = 0; j < TILE_Q; ++j)
        sum[f][i][j] = 0.0f;
    int total = 0;
    for (int number = 0; number < stages; ++number) {
        BARRIER();
#if LISTS
        LIST_VALUES(begin + number * TILE_C)
        BARRIER();
        GLOBAL const float *weight = value + ((LONG)first[BLOCK_Y * stages + number] * 32 + THREAD_X) * FILTERS;
        ROLLED for (int r = 0; r < TAPS_R; ++r) ROLLED for (int s = 0; s < TAPS_S; ++s) {
            HELD(weight);
            UNROLL for (int p = 0; p < TILE_P; ++p) UNROLL for (int q = 0; q < TILE_Q; ++q) {
                int pixel = corner + (p * STRIDE_P + r * DILATION_P) * TILE_W + q * STRIDE_Q + s * DILATION_Q;
                int one = pixel * TILE_C, many = length[pixel], last = one + many;
                total += many;
                ROLLED for (; one + 4 <= last; one += 4) {
                    USE(one, p, q)
                    USE(one + 1, p, q)
                    USE(one + 2, p, q)
                    USE(one + 3, p, q)
                }
                ROLLED for (; one < last; ++one) USE(one, p, q)
            }
            weight += 32 * FILTERS;
        }
#else
        LOCAL const float *from = tile + corner * PITCH;
        stage(tile, image, thread, begin + number * TILE_C, end, channels, height, width, row0 * STRIDE_P - top,
              column0 * STRIDE_Q - left);
        COPIED();
        BARRIER();
        int unit = BLOCK_Y * stages + number, at = first[unit], count = first[unit + 1] - at, found = 0;
        for (int i = 0; i < count; i += 32) {
            int mine = i + THREAD_X, on = 0;
            if (mine < count) {
                LOCAL const float *seen = from + (int)place[at + mine];
                UNROLL for (int p = 0; p < TILE_P; ++p) UNROLL for (int q = 0; q < TILE_Q; ++q)
                    on |= seen[(p * STRIDE_P * TILE_W + q * STRIDE_Q) * PITCH] != 0.0f;
            }
            unsigned bits;
            VOTE(votes[THREAD_Y], on, bits);
            if (on) active[THREAD_Y][found + COUNT_BITS(bits & ((1u << THREAD_X) - 1u))] = (unsigned short)mine;
            found += COUNT_BITS(bits);
        }
        BARRIER();
        total += found;
        for (int i = 0; i < found; ++i) {
            int one = at + (int)active[THREAD_Y][i];
            LOCAL const float *seen = from + (int)place[one];
            GLOBAL const float *weight = value + ((LONG)one * 32 + THREAD_X) * FILTERS;
            float w[FILTERS];
            WEIGHTS(w, weight)
            UNROLL for (int p = 0; p < TILE_P; ++p) UNROLL for (int q = 0; q < TILE_Q; ++q) {
                float v = seen[(p * STRIDE_P * TILE_W + q * STRIDE_Q) * PITCH];
                UNROLL for (int f = 0; f < FILTERS; ++f) sum[f][p][q] = FMA(w[f], v, sum[f][p][q]);
            }
        }
#endif
    }
    if (thread == 0) counts[(BLOCK_Z * groups + BLOCK_Y) * tiles + BLOCK_X] = LISTS ? total / (TILE_P * TILE_Q) : total;
    int lane = (BLOCK_Y % groups_of_lanes * 32 + THREAD_X) * FILTERS;
    UNROLL for (int f = 0; f < FILTERS; ++f) {
        int own = BLOCK_Y / groups_of_lanes * group_filters + lane + f;
        if (lane + f >= group_filters) continue;
#if POOL
        UNROLL for (int i = 0; i < TILE_P; ++i) UNROLL for (int j = 0; j < TILE_Q; ++j) {
            LONG at = 0; /* no residual comes before a pooling */
            FINISH(sum[f][i][j], own, at);
        }
        UNROLL for (int a = 0; a < POOLED_P; ++a) UNROLL for (int b = 0; b < POOLED_Q; ++b) {
            float best = POOL == 1 ? -INFINITE : 0.0f;
            UNROLL for (int i = 0; i < WINDOW_P; ++i) UNROLL for (int j = 0; j < WINDOW_Q; ++j) {
                int p = row0 + own_p + a * POOL_P + i, q = column0 + own_q + b * POOL_Q + j;
                float v = sum[f][a * POOL_P + i][b * POOL_Q + j];
                if (p >= 0 && p < rows && q >= 0 && q < columns) best = POOL == 2 ? best + v : v > best || v != v ? v : best;
            }
            int p = tile_p * (WARPS_P * POOLED_P) + THREAD_Y / WARPS_Q * POOLED_P + a;
            int q = tile_q * (WARPS_Q * POOLED_Q) + THREAD_Y % WARPS_Q * POOLED_Q + b;
            if (p < y_rows && q < y_columns)
                y[(((LONG)BLOCK_Z * y_rows + p) * y_columns + q) * filters + own] = POOL == 2 ? best * (1.0f / (WINDOW_P * WINDOW_Q)) : best;
        }
#else
        UNROLL for (int i = 0; i < TILE_P; ++i) UNROLL for (int j = 0; j < TILE_Q; ++j) {
            int p = row0 + own_p + i, q = column0 + own_q + j;
            if (p < rows && q < columns) {
                LONG at = (((LONG)BLOCK_Z * rows + p) * columns + q) * filters + own;
                float v = sum[f][i][j];
                FINISH(v, own, at);
                y[at] = v;
            }
        }
#endif
    }
}

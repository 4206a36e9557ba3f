/* The fair opponent, for benchmarks/sim and gpu_facts: every weight, zero or not. Not offered to users.

   A lane has FILTERS filters, 32 apart, and a warp TILE_P x TILE_Q outputs of them. For DEPTH channels at a time a thread takes the patch
   of x under its outputs into registers, each value once, and then goes through the taps: no compiler has to find that out. */
#undef PATCH_H
#undef PATCH_W
#define PATCH_H ((TILE_P - 1) * STRIDE_P + (TAPS_R - 1) * DILATION_P + 1)
#define PATCH_W ((TILE_Q - 1) * STRIDE_Q + (TAPS_S - 1) * DILATION_Q + 1)

KERNEL(32, WARPS_P *WARPS_Q)
dense(GLOBAL const float *RESTRICT x, GLOBAL float *RESTRICT y, GLOBAL const float *RESTRICT bias, GLOBAL const float *RESTRICT residual,
      GLOBAL const float *RESTRICT weight, float parameter, int channels, int height, int width, int filters, int rows, int columns,
      int top, int left, int tiles_across, int stages)
{
    SHARED float tile[TILE_FLOATS];
    int thread = THREAD_Y * 32 + THREAD_X, tile_p = BLOCK_X / tiles_across, tile_q = BLOCK_X - tile_p * tiles_across;
    int row0 = tile_p * (WARPS_P * TILE_P), column0 = tile_q * (WARPS_Q * TILE_Q);
    int own_p = THREAD_Y / WARPS_Q * TILE_P, own_q = THREAD_Y % WARPS_Q * TILE_Q, lane = BLOCK_Y * 32 * FILTERS + THREAD_X;
    LOCAL const float *from = tile + (own_p * STRIDE_P * TILE_W + own_q * STRIDE_Q) * PITCH;
    GLOBAL const float *image = x + (LONG)BLOCK_Z * height * width * channels;
    float sums[FILTERS][TILE_P][TILE_Q][1], seen[DEPTH][PATCH_H][PATCH_W];
    UNROLL for (int f = 0; f < FILTERS; ++f) UNROLL for (int i = 0; i < TILE_P; ++i) UNROLL for (int j = 0; j < TILE_Q; ++j)
        sums[f][i][j][0] = 0.0f;
    for (int number = 0; number < stages; ++number) {
        BARRIER();
        stage(tile, image, thread, number * TILE_C, channels, channels, height, width, row0 * STRIDE_P - top, column0 * STRIDE_Q - left);
        COPIED();
        BARRIER();
        /* [channel][tap][filter], filled up with zeros to whole stages and whole groups of filters */
        GLOBAL const float *own_weight = weight + (LONG)number * TILE_C * TAPS_R * TAPS_S * ROUNDED + lane;
        for (int c = 0; c < TILE_C; c += DEPTH) {
            UNROLL for (int i = 0; i < PATCH_H; ++i) UNROLL for (int j = 0; j < PATCH_W; ++j) {
                LOCAL const float *at = from + (i * TILE_W + j) * PITCH + c;
#if DEPTH == 4
                float4 v = *(LOCAL const float4 *)at;
                seen[0][i][j] = v.x;
                seen[1][i][j] = v.y;
                seen[2][i][j] = v.z;
                seen[3][i][j] = v.w;
#else
                seen[0][i][j] = *at;
#endif
            }
            UNROLL for (int d = 0; d < DEPTH; ++d) UNROLL for (int r = 0; r < TAPS_R; ++r) UNROLL for (int s = 0; s < TAPS_S; ++s) {
                UNROLL for (int f = 0; f < FILTERS; ++f) {
                    float w = READ(own_weight + ((d * TAPS_R + r) * TAPS_S + s) * ROUNDED + f * 32);
                    UNROLL for (int i = 0; i < TILE_P; ++i) UNROLL for (int j = 0; j < TILE_Q; ++j)
                        sums[f][i][j][0] =
                            FMA(w, seen[d][i * STRIDE_P + r * DILATION_P][j * STRIDE_Q + s * DILATION_Q], sums[f][i][j][0]);
                }
            }
            own_weight += DEPTH * TAPS_R * TAPS_S * ROUNDED;
        }
    }
    UNROLL for (int f = 0; f < FILTERS; ++f) {
        float(*sum)[TILE_Q][1] = sums[f];
        int own = lane + f * 32;
        if (own < filters) STORE_SUMS()
    }
}

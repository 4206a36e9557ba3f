/* The fair opponent, for benchmarks/sim and gpu_facts: every weight, zero or not, with stridepack's tiling. Not offered to users. */
KERNEL(32, WARPS_P *WARPS_Q)
dense(GLOBAL const float *RESTRICT x, GLOBAL float *RESTRICT y, GLOBAL const float *RESTRICT bias, GLOBAL const float *RESTRICT residual,
      GLOBAL const float *RESTRICT weight, float parameter, int channels, int height, int width, int filters, int rows, int columns,
      int top, int left, int tiles_across, int stages)
{
    SHARED float tile[TILE_FLOATS];
    int thread = THREAD_Y * 32 + THREAD_X, tile_p = BLOCK_X / tiles_across, tile_q = BLOCK_X - tile_p * tiles_across;
    int row0 = tile_p * (WARPS_P * TILE_P), column0 = tile_q * (WARPS_Q * TILE_Q);
    int own_p = THREAD_Y / WARPS_Q * TILE_P, own_q = THREAD_Y % WARPS_Q * TILE_Q, own = BLOCK_Y * 32 + THREAD_X;
    int base = (own_p * STRIDE_P * TILE_W + own_q * STRIDE_Q) * PITCH;
    GLOBAL const float *image = x + (LONG)BLOCK_Z * height * width * channels;
    float sum[TILE_P][TILE_Q][1];
    UNROLL for (int i = 0; i < TILE_P; ++i) UNROLL for (int j = 0; j < TILE_Q; ++j) sum[i][j][0] = 0.0f;
    for (int number = 0; number < stages; ++number) {
        BARRIER();
        stage(tile, image, thread, number * TILE_C, channels, channels, height, width, row0 * STRIDE_P - top, column0 * STRIDE_Q - left);
        COPIED();
        BARRIER();
        for (int c = 0; c < TILE_C; ++c)
            UNROLL for (int r = 0; r < TAPS_R; ++r) UNROLL for (int s = 0; s < TAPS_S; ++s) {
                /* [stage][channel][tap][filter], filled up with zeros to whole stages and groups of 32 */
                float v = READ(weight + (((LONG)(number * TILE_C + c) * TAPS_R + r) * TAPS_S + s) * ROUNDED + own);
                LOCAL const float *from = tile + base + (r * DILATION_P * TILE_W + s * DILATION_Q) * PITCH + c;
                UNROLL for (int i = 0; i < TILE_P; ++i) UNROLL for (int j = 0; j < TILE_Q; ++j)
                    sum[i][j][0] = FMA(v, from[(i * STRIDE_P * TILE_W + j * STRIDE_Q) * PITCH], sum[i][j][0]);
            }
    }
    if (own < filters) STORE_SUMS()
}

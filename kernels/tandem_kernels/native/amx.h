// AMX: each thread has eight tiles of up to 16 rows of 64 bytes. Tiles 0 to 3 hold the sums of the
// products of two tiles of inputs and two tiles of weights:
//
//                         weights in tile 6    weights in tile 7
//     inputs in tile 4    sums in tile 0       sums in tile 1       `rows` rows
//     inputs in tile 5    sums in tile 2       sums in tile 3       `more_rows` rows
//
// The instructions are inline asm, because GCC 12's intrinsics do not declare the memory that they
// read. Denormal bf16 numbers and denormal sums are treated as zeros.

namespace tandem::TANDEM_ISA {

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
};

// The rows for which this thread's tiles are configured; 0: not configured.
inline thread_local int tiles_shaped = 0;

// Configures the tiles for these numbers of rows. If the numbers differ from the current ones, this
// takes about 100 ns and sets all tiles to zero.
inline void shape_tiles(int rows, int more_rows) {
    const int wanted = rows * 32 + more_rows;
    if (tiles_shaped == wanted) return;
    tiles_shaped = wanted;
    TileShapes shapes;
    const int all_rows[] = {rows, rows, more_rows, more_rows, rows, more_rows, 16, 16};
    for (int tile = 0; tile < 8; ++tile) shapes.rows[tile] = static_cast<uint8_t>(all_rows[tile]);
    asm volatile("ldtilecfg %0" ::"m"(shapes));
}

// An object that exists while a thread uses tiles. Its destructor releases the tiles, because a
// context switch would otherwise have to save their 8 KiB.
struct TilesInUse {
    TilesInUse() { tiles_shaped = 0; }
    TilesInUse(const TilesInUse&) = delete;
    TilesInUse& operator=(const TilesInUse&) = delete;
    ~TilesInUse() {
        tiles_shaped = 0;
        asm volatile("tilerelease" ::: "memory");
    }
};

template <int kTile>
inline void zero_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

template <int kTile>
inline void load_tile(const void* from, size_t stride_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_bytes), "i"(kTile)
                 : "memory");
}

// Loads a tile that is used only once, so it should not evict other data from the L1 cache.
template <int kTile>
inline void load_tile_once(const void* from, size_t stride_bytes) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_bytes), "i"(kTile)
                 : "memory");
}

template <int kTile>
inline void store_tile(void* to, size_t stride_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride_bytes), "i"(kTile)
                 : "memory");
}

// Adds the product of two bf16 tiles to the fp32 sums. The weights are in pairs of inputs
// (decoder.h).
template <int kSumsTile, int kInputsTile, int kWeightsTile>
inline void multiply_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSumsTile), "i"(kInputsTile),
                 "i"(kWeightsTile));
}

}  // namespace tandem::TANDEM_ISA

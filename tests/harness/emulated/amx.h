// The tiles of AMX and their products of bf16 numbers, written in C++: the functions of amx.h.

namespace tandem::TANDEM_ISA {

struct AmxTiles {
    int rows[8] = {};  // 0: the tiles are not configured
    alignas(64) uint32_t words[8][16][16] = {};
};

inline thread_local AmxTiles amx_tiles;
inline thread_local int tiles_shaped = 0;

inline void shape_tiles(int rows, int more_rows) {
    const int wanted = rows * 32 + more_rows;
    if (tiles_shaped == wanted) return;
    tiles_shaped = wanted;
    amx_tiles = {{rows, rows, more_rows, more_rows, rows, more_rows, 16, 16}};
}

struct TilesInUse {
    TilesInUse() { tiles_shaped = 0; }
    TilesInUse(const TilesInUse&) = delete;
    TilesInUse& operator=(const TilesInUse&) = delete;
    ~TilesInUse() {
        tiles_shaped = 0;
        amx_tiles = {};
    }
};

template <int kTile>
inline void zero_tile() {
    std::memset(amx_tiles.words[kTile], 0, sizeof amx_tiles.words[kTile]);
}

template <int kTile>
inline void load_tile(const void* from, size_t stride_bytes) {
    zero_tile<kTile>();
    for (int row = 0; row < amx_tiles.rows[kTile]; ++row)
        std::memcpy(amx_tiles.words[kTile][row],
                    static_cast<const char*>(from) + row * stride_bytes, 64);
}

template <int kTile>
inline void load_tile_once(const void* from, size_t stride_bytes) {
    load_tile<kTile>(from, stride_bytes);
}

template <int kTile>
inline void store_tile(void* to, size_t stride_bytes) {
    for (int row = 0; row < amx_tiles.rows[kTile]; ++row)
        std::memcpy(static_cast<char*>(to) + row * stride_bytes, amx_tiles.words[kTile][row], 64);
}

// As the processor does, adds up the products of the lower and of the upper numbers of all words
// separately, and both to the sum at the end.
template <int kSumsTile, int kInputsTile, int kWeightsTile>
inline void multiply_tiles() {
    using emulated::as, emulated::multiply_add, emulated::wide;
    for (int row = 0; row < amx_tiles.rows[kSumsTile]; ++row) {
        float lower[16] = {}, upper[16] = {};
        for (int k = 0; k < 16; ++k) {
            const uint32_t inputs = amx_tiles.words[kInputsTile][row][k];
            const float low = wide(inputs & 0xffff), high = wide(inputs >> 16);
            for (int n = 0; n < 16; ++n) {
                const uint32_t weights = amx_tiles.words[kWeightsTile][k][n];
                lower[n] = multiply_add(low, wide(weights & 0xffff), lower[n]);
                upper[n] = multiply_add(high, wide(weights >> 16), upper[n]);
            }
        }
        for (int n = 0; n < 16; ++n) {
            uint32_t& sum = amx_tiles.words[kSumsTile][row][n];
            const float both = emulated::flushed(lower[n] + upper[n]);
            sum = as<uint32_t>(emulated::flushed(emulated::flushed(as<float>(sum)) + both));
        }
    }
}

}  // namespace tandem::TANDEM_ISA

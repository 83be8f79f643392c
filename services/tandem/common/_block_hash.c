/* The chained block hash of services/tandem/common/block_hash.py, for whole prompts at once.
 *
 *     chain(root, token_ids, block_size, key) -> list of 16-byte hashes, one for each full block
 *
 * Each hash is keyed BLAKE2b (RFC 7693) with a digest of 16 bytes, over the previous block's hash
 * and the token ids as little-endian uint32. BLAKE2b compresses its input in pieces of 128 bytes,
 * the first of which contains the key. This piece is always the same and is compressed only once,
 * so a KV block of up to 28 tokens costs one compression instead of two. The GIL is released during
 * hashing.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define BLOCK_BYTES 128
#define HASH_BYTES 16

typedef struct {
    uint64_t h[8];
    uint64_t counted; /* bytes compressed so far */
} State;

static const uint64_t IV[8] = {
    0x6a09e667f3bcc908ULL, 0xbb67ae8584caa73bULL, 0x3c6ef372fe94f82bULL, 0xa54ff53a5f1d36f1ULL,
    0x510e527fade682d1ULL, 0x9b05688c2b3e6c1fULL, 0x1f83d9abfb41bd6bULL, 0x5be0cd19137e2179ULL,
};

static const uint8_t SIGMA[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
    {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
    {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
    {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
    {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

static uint64_t rotate_right(uint64_t word, int bits) { return (word >> bits) | (word << (64 - bits)); }

static uint64_t load_le64(const uint8_t *bytes)
{
    uint64_t word = 0;
    for (int i = 7; i >= 0; i--)
        word = word << 8 | bytes[i];
    return word;
}

static void store_le32(uint8_t *bytes, uint32_t word)
{
    for (int i = 0; i < 4; i++)
        bytes[i] = (uint8_t)(word >> (8 * i));
}

#define MIX(a, b, c, d, x, y)                 \
    do {                                      \
        a += b + (x), d = rotate_right(d ^ a, 32); \
        c += d, b = rotate_right(b ^ c, 24);  \
        a += b + (y), d = rotate_right(d ^ a, 16); \
        c += d, b = rotate_right(b ^ c, 63);  \
    } while (0)

static void compress(State *state, const uint8_t block[BLOCK_BYTES], uint64_t num_bytes, int is_last)
{
    uint64_t v[16], m[16];
    state->counted += num_bytes;
    for (int i = 0; i < 8; i++) {
        v[i] = state->h[i];
        v[i + 8] = IV[i];
    }
    v[12] ^= state->counted; /* the upper half of the counter stays 0 here */
    if (is_last)
        v[14] = ~v[14];
    for (int i = 0; i < 16; i++)
        m[i] = load_le64(block + 8 * i);
    for (int round = 0; round < 12; round++) {
        const uint8_t *s = SIGMA[round];
        MIX(v[0], v[4], v[8], v[12], m[s[0]], m[s[1]]);
        MIX(v[1], v[5], v[9], v[13], m[s[2]], m[s[3]]);
        MIX(v[2], v[6], v[10], v[14], m[s[4]], m[s[5]]);
        MIX(v[3], v[7], v[11], v[15], m[s[6]], m[s[7]]);
        MIX(v[0], v[5], v[10], v[15], m[s[8]], m[s[9]]);
        MIX(v[1], v[6], v[11], v[12], m[s[10]], m[s[11]]);
        MIX(v[2], v[7], v[8], v[13], m[s[12]], m[s[13]]);
        MIX(v[3], v[4], v[9], v[14], m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < 8; i++)
        state->h[i] ^= v[i] ^ v[i + 8];
}

/* Sets `state` to the state after the piece of 128 bytes that contains the key. */
static void keyed(State *state, const uint8_t *key, size_t key_bytes)
{
    uint8_t block[BLOCK_BYTES] = {0};
    memcpy(state->h, IV, sizeof IV);
    state->h[0] ^= 0x01010000ULL ^ (uint64_t)key_bytes << 8 ^ HASH_BYTES;
    state->counted = 0;
    memcpy(block, key, key_bytes);
    compress(state, block, BLOCK_BYTES, 0);
}

static void finish(State state, const uint8_t *message, size_t num_bytes, uint8_t digest[HASH_BYTES])
{
    uint8_t last[BLOCK_BYTES] = {0};
    while (num_bytes > BLOCK_BYTES) {
        compress(&state, message, BLOCK_BYTES, 0);
        message += BLOCK_BYTES;
        num_bytes -= BLOCK_BYTES;
    }
    memcpy(last, message, num_bytes);
    compress(&state, last, num_bytes, 1);
    for (int i = 0; i < HASH_BYTES; i++)
        digest[i] = (uint8_t)(state.h[i / 8] >> (8 * (i % 8)));
}

/* Writes token ids as bytes. Returns -1 and sets an exception if a token id is no uint32. */
static int pack_tokens(PyObject *tokens, Py_ssize_t count, uint8_t *packed)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned long token = PyLong_AsUnsignedLong(PySequence_Fast_GET_ITEM(tokens, i));
        if (token == (unsigned long)-1 && PyErr_Occurred())
            return -1;
        if (token > UINT32_MAX) {
            PyErr_Format(PyExc_OverflowError, "token id %lu does not fit 32 bits", token);
            return -1;
        }
        store_le32(packed + 4 * i, (uint32_t)token);
    }
    return 0;
}

static PyObject *chain(PyObject *module, PyObject *arguments)
{
    Py_buffer root, key;
    PyObject *token_ids, *tokens = NULL, *hashes = NULL;
    Py_ssize_t block_size;
    uint8_t *packed = NULL, *digests = NULL, *message = NULL;
    if (!PyArg_ParseTuple(arguments, "y*Ony*", &root, &token_ids, &block_size, &key))
        return NULL;
    if (root.len != HASH_BYTES || key.len < 1 || key.len > 64 || block_size < 1) {
        PyErr_SetString(PyExc_ValueError, "a root of 16 bytes, a key of 1 to 64, and blocks of 1 token or more");
        goto done;
    }
    if (!(tokens = PySequence_Fast(token_ids, "token ids must be a sequence")))
        goto done;
    Py_ssize_t num_blocks = PySequence_Fast_GET_SIZE(tokens) / block_size;
    size_t token_bytes = 4 * (size_t)block_size;
    packed = PyMem_Malloc(num_blocks * token_bytes + 1);
    digests = PyMem_Malloc((size_t)num_blocks * HASH_BYTES + 1);
    message = PyMem_Malloc(HASH_BYTES + token_bytes);
    if (!packed || !digests || !message) {
        PyErr_NoMemory();
        goto done;
    }
    if (pack_tokens(tokens, num_blocks * block_size, packed) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS;
    State start;
    keyed(&start, key.buf, (size_t)key.len);
    const uint8_t *parent = root.buf;
    for (Py_ssize_t i = 0; i < num_blocks; i++) {
        memcpy(message, parent, HASH_BYTES);
        memcpy(message + HASH_BYTES, packed + i * token_bytes, token_bytes);
        finish(start, message, HASH_BYTES + token_bytes, digests + i * HASH_BYTES);
        parent = digests + i * HASH_BYTES;
    }
    Py_END_ALLOW_THREADS;
    if (!(hashes = PyList_New(num_blocks)))
        goto done;
    for (Py_ssize_t i = 0; i < num_blocks; i++) {
        PyObject *hash = PyBytes_FromStringAndSize((char *)digests + i * HASH_BYTES, HASH_BYTES);
        if (!hash) {
            Py_CLEAR(hashes);
            goto done;
        }
        PyList_SET_ITEM(hashes, i, hash);
    }
done:
    PyMem_Free(packed);
    PyMem_Free(digests);
    PyMem_Free(message);
    Py_XDECREF(tokens);
    PyBuffer_Release(&root);
    PyBuffer_Release(&key);
    return hashes;
}

static PyMethodDef methods[] = {
    {"chain", chain, METH_VARARGS, "chain(root, token_ids, block_size, key) -> list of hashes"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tandem.common._block_hash", "See services/tandem/common/block_hash.py.", -1, methods,
};

PyMODINIT_FUNC PyInit__block_hash(void) { return PyModule_Create(&definition); }

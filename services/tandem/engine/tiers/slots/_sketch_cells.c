/* The cells of services/tandem/engine/tiers/slots/frequency_sketch.py: four rows of doubles, row after row.
 *
 *     add(cells, block_hashes, weight)   adds `weight` to the cells of each block
 *     smallest(cells, block_hash)        -> the smallest cell of a block
 *
 * A block hash has 16 bytes: a little-endian uint32 for each row, whose lowest bits are the index of
 * the cell. The number of cells in a row is a power of 2. A single NumPy operation would cost as much
 * as one of these functions, because after a step of the model no code is in the processor's caches.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define ROWS 4
#define HASH_BYTES 16

/* Opens the buffer of the cells and sets `width` to the number of cells in a row. Raises ValueError. */
static int open_cells(PyObject *object, Py_buffer *cells, Py_ssize_t *width)
{
    if (PyObject_GetBuffer(object, cells, PyBUF_WRITABLE) < 0)
        return -1;
    *width = cells->len / (Py_ssize_t)sizeof(double) / ROWS;
    if (*width && !(*width & (*width - 1)) && cells->len == *width * ROWS * (Py_ssize_t)sizeof(double))
        return 0;
    PyBuffer_Release(cells);
    PyErr_SetString(PyExc_ValueError, "cells are four rows of doubles, each a power of 2");
    return -1;
}

/* Sets `at` to the indices of a block's cells. Raises ValueError. */
static int find_cells(PyObject *block_hash, Py_ssize_t width, Py_ssize_t at[ROWS])
{
    if (!PyBytes_Check(block_hash) || PyBytes_GET_SIZE(block_hash) != HASH_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a block hash is 16 bytes");
        return -1;
    }
    const uint8_t *part = (const uint8_t *)PyBytes_AS_STRING(block_hash);
    for (int row = 0; row < ROWS; row++, part += 4) {
        uint32_t word = part[0] | part[1] << 8 | part[2] << 16 | (uint32_t)part[3] << 24;
        at[row] = row * width + (Py_ssize_t)(word & (uint32_t)(width - 1));
    }
    return 0;
}

static PyObject *add(PyObject *module, PyObject *args)
{
    PyObject *object, *given, *hashes, *result = NULL;
    double weight;
    Py_buffer cells;
    Py_ssize_t width, at[ROWS];
    (void)module;
    if (!PyArg_ParseTuple(args, "OOd", &object, &given, &weight))
        return NULL;
    if (!(hashes = PySequence_Fast(given, "block hashes are a sequence")))
        return NULL;
    if (open_cells(object, &cells, &width) == 0) {
        result = Py_None;
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(hashes); i++) {
            if (find_cells(PySequence_Fast_GET_ITEM(hashes, i), width, at) < 0) {
                result = NULL;
                break;
            }
            for (int row = 0; row < ROWS; row++)
                ((double *)cells.buf)[at[row]] += weight;
        }
        PyBuffer_Release(&cells);
    }
    Py_DECREF(hashes);
    return Py_XNewRef(result);
}

static PyObject *smallest(PyObject *module, PyObject *args)
{
    PyObject *object, *block_hash;
    Py_buffer cells;
    Py_ssize_t width, at[ROWS];
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &object, &block_hash))
        return NULL;
    if (open_cells(object, &cells, &width) < 0)
        return NULL;
    const int is_found = find_cells(block_hash, width, at) == 0;
    double count = 0.0;
    for (int row = 0; is_found && row < ROWS; row++) {
        const double cell = ((double *)cells.buf)[at[row]];
        count = row == 0 || cell < count ? cell : count;
    }
    PyBuffer_Release(&cells);
    return is_found ? PyFloat_FromDouble(count) : NULL;
}

static PyMethodDef methods[] = {
    {"add", add, METH_VARARGS, "add(cells, block_hashes, weight)"},
    {"smallest", smallest, METH_VARARGS, "smallest(cells, block_hash) -> float"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tandem.engine.tiers.slots._sketch_cells", "See frequency_sketch.py.", -1, methods,
};

PyMODINIT_FUNC PyInit__sketch_cells(void) { return PyModule_Create(&definition); }

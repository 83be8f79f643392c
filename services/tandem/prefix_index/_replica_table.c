/* The table of services/tandem/prefix_index/shard_replica.py: block -> mask of the slots whose
 * holders have the block.
 *
 *     table = Table(seed)
 *     table.add(mask, entries, stride)         sets the bits of `mask` for each entry
 *     table.remove(mask, entries, stride)      clears them
 *     table.clear(mask, first, end)            clears them for all entries of the parts first, ..., end - 1
 *     table.match(hashes, mask, closed)        -> [slot, depth, slot, depth, ...], see protocol.py
 *     table.count(slot)                        -> number of entries with the slot's bit
 *     table.num_entries, table.num_bytes
 *
 * An entry is the first ten bytes of a block's hash (entries.py). `entries` is a bytes object with an
 * entry every `stride` bytes: 10, or 16 for whole hashes.
 *
 * The table has 256 parts, one for each value of an entry's first byte. A part is a hash table with
 * linear probing. Because a part is small, no call ever moves many entries at once. A part is at most
 * 3/4 full, and at least 9/20 full once it has more than a few entries, so an entry takes 23 to 38
 * bytes. A removed entry leaves no mark: later entries of its run move up. Positions depend on `seed`,
 * so that clients cannot choose prompts whose entries collide.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define ENTRY_BYTES 10
#define NUM_PARTS 256
#define NUM_SLOTS 64
#define CAPACITY_MIN 8
#define ENTRIES_AHEAD 8

/* Packed, so that a cell has 17 bytes and is rarely in more than one cache line. */
typedef struct __attribute__((packed)) {
    uint64_t mask;  /* 0: the cell is empty */
    uint64_t field; /* bytes 2 to 9 of the entry */
    uint8_t second; /* byte 1 */
} Cell;

typedef struct {
    Cell *cells;
    uint32_t capacity, used;
} Part;

typedef struct {
    PyObject_HEAD
    uint64_t seed;
    Part parts[NUM_PARTS];
    Py_ssize_t counts[NUM_SLOTS];
} Table;

static uint64_t field_of(const uint8_t *entry)
{
    uint64_t field;
    memcpy(&field, entry + 2, sizeof field);
    return field;
}

static uint32_t home(const Table *table, const Part *part, uint64_t field)
{
    uint64_t mixed = (field ^ table->seed) * 0x9e3779b97f4a7c15ULL;
    mixed = (mixed ^ mixed >> 32) * 0xd6e8feb86659fd93ULL;
    return (uint32_t)((mixed >> 32) * part->capacity >> 32);
}

static uint32_t after(const Part *part, uint32_t cell) { return cell + 1 == part->capacity ? 0 : cell + 1; }

/* Returns the entry's cell, or the empty cell where the entry would be. The part has an empty cell. */
static uint32_t find(const Table *table, const Part *part, uint64_t field, uint8_t second)
{
    uint32_t cell = home(table, part, field);
    while (part->cells[cell].mask && (part->cells[cell].field != field || part->cells[cell].second != second))
        cell = after(part, cell);
    return cell;
}

/* Moves the part's entries to new arrays in which they fill three fifths. Returns -1 without memory. */
static int rebuild(Table *table, Part *part)
{
    Part made = {.capacity = (uint32_t)((uint64_t)part->used * 5 / 3), .used = part->used};
    if (made.capacity < CAPACITY_MIN)
        made.capacity = CAPACITY_MIN;
    if (!(made.cells = PyMem_Calloc(made.capacity, sizeof(Cell))))
        return -1;
    for (uint32_t old = 0; old < part->capacity; old++) {
        if (!part->cells[old].mask)
            continue;
        uint32_t cell = find(table, &made, part->cells[old].field, part->cells[old].second);
        made.cells[cell] = part->cells[old];
    }
    PyMem_Free(part->cells);
    *part = made;
    return 0;
}

/* Begins to load the cell of an entry into the cache. Most of the time of a change is this load. */
static void prefetch(const Table *table, const uint8_t *entry)
{
    const Part *part = &table->parts[entry[0]];
    __builtin_prefetch(&part->cells[home(table, part, field_of(entry))]);
}

static void count_bits(Table *table, uint64_t bits, int change)
{
    for (; bits; bits &= bits - 1)
        table->counts[__builtin_ctzll(bits)] += change;
}

static int add_entry(Table *table, const uint8_t *entry, uint64_t mask)
{
    Part *part = &table->parts[entry[0]];
    if (4 * ((uint64_t)part->used + 1) > 3 * (uint64_t)part->capacity && rebuild(table, part) < 0)
        return -1;
    uint32_t cell = find(table, part, field_of(entry), entry[1]);
    if (!part->cells[cell].mask) {
        part->cells[cell].field = field_of(entry);
        part->cells[cell].second = entry[1];
        part->used++;
    }
    count_bits(table, mask & ~part->cells[cell].mask, 1);
    part->cells[cell].mask |= mask;
    return 0;
}

/* Empties a cell. Entries that were placed behind it because it was full move up. */
static void empty(Table *table, Part *part, uint32_t hole)
{
    part->used--;
    for (uint32_t cell = after(part, hole); part->cells[cell].mask; cell = after(part, cell)) {
        uint32_t wanted = home(table, part, part->cells[cell].field);
        /* An entry may move to the hole unless its home is between the hole and its cell. */
        int stays = hole < cell ? hole < wanted && wanted <= cell : hole < wanted || wanted <= cell;
        if (stays)
            continue;
        part->cells[hole] = part->cells[cell];
        hole = cell;
    }
    part->cells[hole].mask = 0;
}

static int shrink(Table *table, Part *part)
{
    int is_sparse = 20 * (uint64_t)part->used < 9 * (uint64_t)part->capacity;
    return is_sparse && part->capacity > CAPACITY_MIN ? rebuild(table, part) : 0;
}

static int remove_entry(Table *table, const uint8_t *entry, uint64_t mask)
{
    Part *part = &table->parts[entry[0]];
    if (!part->capacity)
        return 0;
    uint32_t cell = find(table, part, field_of(entry), entry[1]);
    count_bits(table, mask & part->cells[cell].mask, -1);
    if (part->cells[cell].mask & ~mask) {
        part->cells[cell].mask &= ~mask;
        return 0;
    }
    if (!part->cells[cell].mask)
        return 0;
    empty(table, part, cell);
    return shrink(table, part);
}

typedef int (*Change)(Table *, const uint8_t *, uint64_t);

static PyObject *change_each(Table *table, PyObject *arguments, Change change)
{
    unsigned long long mask;
    Py_buffer entries;
    Py_ssize_t stride;
    if (!PyArg_ParseTuple(arguments, "Ky*n", &mask, &entries, &stride))
        return NULL;
    PyObject *result = Py_None;
    if (stride < ENTRY_BYTES || entries.len % stride) {
        PyErr_SetString(PyExc_ValueError, "entries must fill strides of 10 bytes or more");
        result = NULL;
    }
    const uint8_t *at = entries.buf;
    for (const uint8_t *end = at + entries.len; result && at < end && mask; at += stride) {
        if (end - at > ENTRIES_AHEAD * stride)
            prefetch(table, at + ENTRIES_AHEAD * stride);
        if (change(table, at, mask) < 0)
            result = PyErr_NoMemory();
    }
    PyBuffer_Release(&entries);
    return Py_XNewRef(result);
}

static PyObject *add(PyObject *self, PyObject *arguments) { return change_each((Table *)self, arguments, add_entry); }

static PyObject *remove_(PyObject *self, PyObject *arguments)
{
    return change_each((Table *)self, arguments, remove_entry);
}

static PyObject *clear(PyObject *self, PyObject *arguments)
{
    Table *table = (Table *)self;
    unsigned long long mask;
    int first, end;
    if (!PyArg_ParseTuple(arguments, "Kii", &mask, &first, &end))
        return NULL;
    if (first < 0 || first > end || end > NUM_PARTS)
        return PyErr_Format(PyExc_ValueError, "parts %d to %d of %d", first, end, NUM_PARTS);
    for (Part *part = table->parts + first; part < table->parts + end; part++) {
        uint32_t used = 0;
        for (uint32_t cell = 0; cell < part->capacity; cell++) {
            count_bits(table, mask & part->cells[cell].mask, -1);
            part->cells[cell].mask &= ~mask;
            used += part->cells[cell].mask != 0;
        }
        if (used == part->used)
            continue;
        part->used = used;
        if (rebuild(table, part) < 0) /* the runs have gaps, so the entries must be placed again */
            return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

typedef struct {
    const Table *table;
    PyObject *hashes;
    Py_ssize_t depths[NUM_SLOTS];
    int failed;
} Search;

/* Returns the mask of the prompt's block at `depth`, counted from 1. */
static uint64_t holders(Search *search, Py_ssize_t depth)
{
    PyObject *hash = PySequence_Fast_GET_ITEM(search->hashes, depth - 1);
    if (!PyBytes_Check(hash) || PyBytes_GET_SIZE(hash) < ENTRY_BYTES) {
        search->failed = 1;
        return 0;
    }
    const uint8_t *entry = (const uint8_t *)PyBytes_AS_STRING(hash);
    const Part *part = &search->table->parts[entry[0]];
    return part->capacity ? part->cells[find(search->table, part, field_of(entry), entry[1])].mask : 0;
}

static void report(Search *search, uint64_t mask, Py_ssize_t depth)
{
    for (; mask; mask &= mask - 1)
        search->depths[__builtin_ctzll(mask)] = depth;
}

/* Finds the depths of the slots in `mask`: at least `low`, and less than `high`. */
static void narrow(Search *search, uint64_t mask, Py_ssize_t low, Py_ssize_t high)
{
    while (mask && low) {
        if (high - low == 1) {
            report(search, mask, low);
            return;
        }
        Py_ssize_t middle = low + (high - low) / 2;
        uint64_t deeper = mask & holders(search, middle);
        narrow(search, deeper, middle, high);
        mask ^= deeper;
        high = middle;
    }
}

/* The same search as in lua/match.lua and memory.py. */
static void search_closed(Search *search, uint64_t mask, Py_ssize_t count)
{
    Py_ssize_t low = 0;
    for (Py_ssize_t step = 1; mask && low < count; step *= 2) {
        Py_ssize_t probe = step < count - low ? low + step : count;
        uint64_t deeper = mask & holders(search, probe);
        narrow(search, mask ^ deeper, low, probe);
        mask = deeper;
        low = probe;
    }
    report(search, mask, low);
}

static void search_open(Search *search, uint64_t mask, Py_ssize_t count)
{
    for (Py_ssize_t depth = count; mask && depth; depth--) {
        uint64_t found = mask & holders(search, depth);
        report(search, found, depth);
        mask ^= found;
    }
}

static PyObject *match(PyObject *self, PyObject *arguments)
{
    Search search = {.table = (Table *)self};
    PyObject *hashes;
    unsigned long long mask;
    int closed;
    if (!PyArg_ParseTuple(arguments, "OKp", &hashes, &mask, &closed))
        return NULL;
    if (!(search.hashes = PySequence_Fast(hashes, "block hashes must be a sequence")))
        return NULL;
    (closed ? search_closed : search_open)(&search, mask, PySequence_Fast_GET_SIZE(search.hashes));
    Py_DECREF(search.hashes);
    if (search.failed) {
        PyErr_SetString(PyExc_ValueError, "a block hash must be bytes, 10 or more");
        return NULL;
    }
    PyObject *found = PyList_New(0);
    for (int slot = 0; found && slot < NUM_SLOTS; slot++) {
        if (!search.depths[slot])
            continue;
        PyObject *pair[2] = {PyLong_FromLong(slot), PyLong_FromSsize_t(search.depths[slot])};
        for (int i = 0; i < 2; i++) {
            if (found && (!pair[i] || PyList_Append(found, pair[i]) < 0))
                Py_CLEAR(found);
            Py_XDECREF(pair[i]);
        }
    }
    return found;
}

static PyObject *count(PyObject *self, PyObject *argument)
{
    long slot = PyLong_AsLong(argument);
    if (slot == -1 && PyErr_Occurred())
        return NULL;
    if (slot < 0 || slot >= NUM_SLOTS)
        return PyErr_Format(PyExc_ValueError, "slot %ld of %d", slot, NUM_SLOTS);
    return PyLong_FromSsize_t(((Table *)self)->counts[slot]);
}

static PyObject *num_entries(PyObject *self, void *closure)
{
    size_t sum = 0;
    for (int i = 0; i < NUM_PARTS; i++)
        sum += ((Table *)self)->parts[i].used;
    return PyLong_FromSize_t(sum);
}

static PyObject *num_bytes(PyObject *self, void *closure)
{
    size_t sum = sizeof(Table);
    for (int i = 0; i < NUM_PARTS; i++)
        sum += ((Table *)self)->parts[i].capacity * sizeof(Cell);
    return PyLong_FromSize_t(sum);
}

static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *keywords)
{
    unsigned long long seed;
    if (!PyArg_ParseTuple(arguments, "K", &seed))
        return NULL;
    Table *table = (Table *)type->tp_alloc(type, 0); /* all zero: parts without arrays */
    if (table)
        table->seed = seed;
    return (PyObject *)table;
}

static void dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    for (int i = 0; i < NUM_PARTS; i++)
        PyMem_Free(((Table *)self)->parts[i].cells);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"add", add, METH_VARARGS, "add(mask, entries, stride)"},
    {"remove", remove_, METH_VARARGS, "remove(mask, entries, stride)"},
    {"clear", clear, METH_VARARGS, "clear(mask, first, end)"},
    {"match", match, METH_VARARGS, "match(hashes, mask, closed) -> [slot, depth, ...]"},
    {"count", count, METH_O, "count(slot) -> number of entries"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"num_entries", num_entries, NULL, "Number of entries.", NULL},
    {"num_bytes", num_bytes, NULL, "Memory of the table, in bytes.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, make},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {0, NULL},
};

static PyType_Spec spec = {
    "tandem.prefix_index._replica_table.Table", sizeof(Table), 0, Py_TPFLAGS_DEFAULT, slots,
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "tandem.prefix_index._replica_table", "See shard_replica.py.", -1, NULL,
};

PyMODINIT_FUNC PyInit__replica_table(void)
{
    PyObject *module = PyModule_Create(&definition);
    PyObject *type = module ? PyType_FromSpec(&spec) : NULL;
    if (!type || PyModule_AddObject(module, "Table", type) < 0) {
        Py_XDECREF(type);
        Py_CLEAR(module);
    }
    return module;
}

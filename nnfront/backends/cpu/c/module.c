// SPDX-License-Identifier: Apache-2.0
// The module nnfront.backends.cpu.native. Its threads are those of the OpenMP that torch runs on: there is no second pool beside it.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdarg.h>
#include <stdio.h>

#include "native.h"

#define LISTED(set) &kernels_##set,
static const Kernels *const sets[] = {FOR_EACH_SET(LISTED)};
static const Kernels *used;  // the one that runs

// A tensor as DLPack (github.com/dmlc/dlpack, version 1) shows it, and the table of functions by which torch does so; only one of them is wanted.
typedef struct {
    void *data;
    int32_t device, device_id, axes;
    uint8_t kind, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;
    uint64_t offset;
} Shown;
typedef struct {
    struct {
        uint32_t major, minor;
    } version;
    void *older, *functions[3];
    int (*show)(PyObject *tensor, Shown *to);
} Exchange;
enum { VERSION = 1, CPU = 1 };

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*Number)(void);

static Parallel parallel;
static Number thread_count;
static const Exchange *exchange;

typedef struct {
    Share share;
    const void *work;
    Py_ssize_t count, least;
    Py_ssize_t taken;
} Shares;

static void take_shares(void *given) {
    Shares *shares = given;
    const Py_ssize_t threads = thread_count(), count = shares->count;
    // Fewer threads may have come than were asked for; no thread is to be without work.
    const Py_ssize_t each = (count + threads - 1) / threads, least = shares->least < each ? shares->least : each;
    Py_ssize_t first = __atomic_load_n(&shares->taken, __ATOMIC_RELAXED);
    while (first < count) {
        const Py_ssize_t left = count - first, steps = left / (2 * threads * least);
        const Py_ssize_t end = steps > 1 ? first + steps * least : first + (least < left ? least : left);
        if (!__atomic_compare_exchange_n(&shares->taken, &first, end, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) continue;
        shares->share(shares->work, first, end);
        first = __atomic_load_n(&shares->taken, __ATOMIC_RELAXED);
    }
}

void in_shares(Share share, const void *work, Py_ssize_t count, Py_ssize_t least, unsigned threads) {
    Shares shares = {share, work, count, least > 1 ? least : 1, 0};
    if (parallel && threads > 1 && count > 1)
        parallel(take_shares, &shares, threads, 0);
    else
        share(work, 0, count);
}

const char *refused(const char *format, ...) {
    static _Thread_local char text[160];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    return text;
}

static PyObject *use_torch(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3) return PyErr_Format(PyExc_TypeError, "use_torch takes 3 arguments, got %zd", count);
    const Exchange *found = PyCapsule_GetPointer(args[0], "dlpack_exchange_api");
    if (!found) return NULL;
    if (found->version.major != VERSION || !found->show)
        return PyErr_Format(PyExc_ValueError, "DLPack of version %d is wanted, torch has %u", VERSION, (unsigned)found->version.major);
    const Py_ssize_t team = PyLong_AsSsize_t(args[1]), number = PyLong_AsSsize_t(args[2]);
    if (PyErr_Occurred()) return NULL;
    exchange = found, parallel = (Parallel)team, thread_count = (Number)number;
    Py_RETURN_NONE;
}

#define METHOD(name, does) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, #name does}

static const char unreadable[] = "";  // a Python exception is set

static PyObject *result(const char *why) {
    if (!why) Py_RETURN_NONE;
    return why == unreadable ? NULL : PyErr_Format(PyExc_ValueError, "%s", why);
}

// What a kernel takes, in order; how its row is checked and run.
enum Kind { SIZE_, REAL_, OPERAND_ };
typedef const char *Run(const Py_ssize_t *numbers, const Py_ssize_t *bytes);
typedef struct {
    const char *name;
    int count;
    const unsigned char *kinds;
    Run *run;
} Entry;

#define MOST ((Py_ssize_t)1 << 40)
#define SPAN(count, step, last) (((count) > 0) * (((count) - 1) * (step) + (last)))
#define REACH(a, b, c, d, e, f, g, h) (((a) * (b) * (c) * (d) > 0) * (1 + ((a) - 1) * (e) + ((b) - 1) * (f) + ((c) - 1) * (g) + ((d) - 1) * (h)))
#define BLOCKS(stored, columns) \
    ((double)((Py_ssize_t)(columns) / 256) * ((stored) == 7 ? 144 : (stored) == 8 ? 176 : 210) \
        + ((Py_ssize_t)(columns) % 256 > 0) * ((stored) == 7 ? 80 : (stored) == 8 ? 112 : 106))
#define LEAST(a, b) ((a) < (b) ? (a) : (b))
#define ITEM(kind) (2 + 2 * ((kind) == 1) - ((kind) == 2) + 2 * ((kind) == 3) + 6 * ((kind) == 4))
#define SCALE(kind) (ITEM(kind) - 3 * ((kind) == 3))

// Bytes are counted in double, which holds every number of them that memory has, and in which no product overflows.
#define KERNEL(name, arguments) \
    static const char *checked_##name(const Py_ssize_t *numbers, const Py_ssize_t *extents) { \
        const char *const kernel = #name; \
        struct name row; \
        const struct name *const n = &row; \
        memcpy(&row, numbers, sizeof row); \
        arguments \
        return FUNCTION_OF(used, name)(n); \
    }
#define SIZE(name) \
    const double name = (double)n->name; \
    if (n->name < 0 || n->name > MOST) return refused("%s: %s is %zd, it must be from 0 to 2^40", kernel, #name, n->name); \
    (void)name, extents++;
#define REAL(name) extents++;
#define IN(name, bytes) \
    const bool name = n->name != NULL; \
    if (!((bytes) <= (double)*extents)) return refused("%s: %s has %zd bytes, %.0f are needed", kernel, #name, *extents, (double)(bytes)); \
    (void)name, extents++;
#define OUT IN
#include "kernels.def"

#define KERNEL(name, arguments) static const unsigned char kinds_of_##name[] = {arguments};
#define SIZE(name) SIZE_,
#define REAL(name) REAL_,
#define IN(name, bytes) OPERAND_,
#define OUT IN
#include "kernels.def"

#define KERNEL(name, arguments) {#name, sizeof kinds_of_##name, kinds_of_##name, checked_##name},
static const Entry kernels[] = {
#include "kernels.def"
};

#define KERNEL(name, arguments) index_of_##name,
enum {
#include "kernels.def"
    KERNELS
};

#define KERNEL(name, arguments) struct name name;
union any {
#include "kernels.def"
};
enum { MOST_NUMBERS = sizeof(union any) / sizeof(Py_ssize_t) };

// Memory that Python names: where it is, and how many bytes from there on belong to a tensor. Or a number, which is no memory.
typedef struct {
    Py_ssize_t address, bytes;
    bool is_number;
} Memory;

static bool read_tensor(PyObject *tensor, Memory *memory) {
    Shown shown;
    *memory = (Memory){0};
    if (tensor == Py_None) return true;
    if (exchange->show(tensor, &shown)) return false;
    if (shown.device != CPU) {
        PyErr_SetString(PyExc_ValueError, "a tensor is not on the CPU");
        return false;
    }
    int64_t last = 0;
    bool is_empty = !shown.data;
    for (int i = 0; i < shown.axes; i++) {
        is_empty |= !shown.shape[i];
        last += (shown.shape[i] - 1) * shown.strides[i];
    }
    static char nothing;  // what is empty is there, though it lies nowhere
    memory->address = is_empty ? (Py_ssize_t)&nothing : (Py_ssize_t)shown.data + (Py_ssize_t)shown.offset;
    memory->bytes = is_empty ? 0 : (last + 1) * shown.bits / 8 * shown.lanes;
    return true;
}

static const char *behind(Memory *memory, Py_ssize_t offset) {
    if (memory->is_number) return refused("a number is no place");
    if (offset < 0 || offset > memory->bytes) return refused("a place %zd bytes into %zd", offset, memory->bytes);
    memory->address += offset, memory->bytes -= offset;
    return NULL;
}

// An operand of a call: a tensor, None, or a tensor and how many bytes into it.
static const char *read_operand(PyObject *given, Memory *memory) {
    if (!PyTuple_Check(given)) return read_tensor(given, memory) ? NULL : unreadable;
    if (PyTuple_Size(given) != 2) return refused("a tensor and an offset, got a tuple of %zd", PyTuple_Size(given));
    const Py_ssize_t offset = PyLong_AsSsize_t(PyTuple_GetItem(given, 1));
    if (PyErr_Occurred() || !read_tensor(PyTuple_GetItem(given, 0), memory)) return unreadable;
    return behind(memory, offset);
}

static const char *read_call(const Entry *kernel, PyObject *const *args, Py_ssize_t *numbers, Py_ssize_t *bytes) {
    for (int i = 0; i < kernel->count; i++) {
        bytes[i] = 0;
        if (kernel->kinds[i] == OPERAND_) {
            Memory memory;
            const char *why = read_operand(args[i], &memory);
            if (why) return why;
            numbers[i] = memory.address, bytes[i] = memory.bytes;
        } else if (kernel->kinds[i] == REAL_) {
            const double real = PyFloat_AsDouble(args[i]);
            memcpy(numbers + i, &real, sizeof real);
        } else {
            numbers[i] = PyLong_AsSsize_t(args[i]);
        }
    }
    return PyErr_Occurred() ? unreadable : NULL;
}

static PyObject *call(const Entry *kernel, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t numbers[MOST_NUMBERS], bytes[MOST_NUMBERS];
    if (count != kernel->count) return PyErr_Format(PyExc_TypeError, "%s takes %d arguments, got %zd", kernel->name, kernel->count, count);
    const char *why = read_call(kernel, args, numbers, bytes);
    if (!why) {
        Py_BEGIN_ALLOW_THREADS
        why = kernel->run(numbers, bytes);
        Py_END_ALLOW_THREADS
    }
    return result(why);
}

#define KERNEL(name, arguments) \
    static PyObject *call_##name(PyObject *self, PyObject *const *args, Py_ssize_t count) { return call(kernels + index_of_##name, args, count); }
#include "kernels.def"

// A row of a sequence: a kernel, which of its numbers are places, and its numbers. A place is a memory by its index, and bytes behind its begin;
// where a kernel takes a size, it is a number in the place of a memory.
enum { ROW = 2 + MOST_NUMBERS, OFFSET_BITS = 40 };

static const char *run_row(const Py_ssize_t *row, const Memory *memories, Py_ssize_t count) {
    Py_ssize_t numbers[MOST_NUMBERS], bytes[MOST_NUMBERS];
    if (row[0] < 0 || row[0] >= KERNELS) return refused("there is no kernel %zd", row[0]);
    const Entry *kernel = kernels + row[0];
    for (int i = 0; i < kernel->count; i++) {
        const bool is_operand = kernel->kinds[i] == OPERAND_;
        numbers[i] = row[2 + i], bytes[i] = 0;
        if (!(row[1] >> i & 1)) {
            if (is_operand && numbers[i]) return refused("%s: argument %d is no place", kernel->name, i);
            continue;
        }
        const Py_ssize_t index = numbers[i] >> OFFSET_BITS;
        if (index < 0 || index >= count) return refused("%s: there is no memory %zd", kernel->name, index);
        Memory memory = memories[index];
        if (is_operand) {
            const char *why = behind(&memory, numbers[i] & (((Py_ssize_t)1 << OFFSET_BITS) - 1));
            if (why) return why;
        } else if (!memory.is_number) {
            return refused("%s: argument %d is no number", kernel->name, i);
        }
        numbers[i] = memory.address, bytes[i] = memory.bytes;
    }
    return kernel->run(numbers, bytes);
}

static const char *run_rows(const Memory *rows, const Memory *memories, Py_ssize_t count) {
    const Py_ssize_t *row = (const Py_ssize_t *)rows->address, *end = row + rows->bytes / (ROW * (Py_ssize_t)sizeof *row) * ROW;
    for (; row < end; row += ROW) {
        const char *why = run_row(row, memories, count);
        if (why) return why;
    }
    return NULL;
}

static PyObject *run_sequence(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Memory rows, *memories;
    if (count < 1) return PyErr_Format(PyExc_TypeError, "run_sequence takes at least 1 argument, got %zd", count);
    if (!read_tensor(args[0], &rows)) return NULL;
    if (!(memories = PyMem_Malloc((size_t)count * sizeof *memories))) return PyErr_NoMemory();
    const char *why = NULL;
    for (Py_ssize_t i = 1; i < count && !why; i++) {
        Memory *memory = memories + i - 1;
        if (PyLong_Check(args[i])) {
            *memory = (Memory){PyLong_AsSsize_t(args[i]), 0, true};
            why = PyErr_Occurred() ? unreadable : NULL;
        } else {
            why = read_tensor(args[i], memory) ? NULL : unreadable;
        }
    }
    if (!why) {
        Py_BEGIN_ALLOW_THREADS
        why = run_rows(&rows, memories, count - 1);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(memories);
    return result(why);
}

static PyObject *use_set(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 1) return PyErr_Format(PyExc_TypeError, "use_set takes 1 argument, got %zd", count);
    const char *name = PyUnicode_AsUTF8AndSize(args[0], NULL);
    for (size_t i = 0; name && i < sizeof sets / sizeof *sets; i++)
        if (!strcmp(sets[i]->set, name) && sets[i]->runs()) {
            used = sets[i];
            Py_RETURN_NONE;
        }
    return name ? PyErr_Format(PyExc_ValueError, "this processor does not run kernels for %s", name) : NULL;
}

static PyObject *used_set(PyObject *self, PyObject *const *args, Py_ssize_t count) { return PyUnicode_FromString(used->set); }

static PyObject *has_tiles(PyObject *self, PyObject *const *args, Py_ssize_t count) { return PyBool_FromLong(FUNCTION_OF(used, has_tiles)()); }

static PyMethodDef methods[] = {
    METHOD(use_torch, "(exchange, GOMP_parallel, omp_get_num_threads): read tensors by this table, run on these threads, by addresses"),
    METHOD(use_set, "(name): run the kernels for this set of instructions, one of `sets`"),
    METHOD(used_set, "(): the set of instructions whose kernels run"),
    METHOD(has_tiles, "(): whether products may use matrix tiles"),
    METHOD(run_sequence, "(rows, *memories): run kernels one after the other, each a row of numbers; a memory is a tensor, None or a number"),
#define KERNEL(name, arguments) {#name, (PyCFunction)(void (*)(void))call_##name, METH_FASTCALL, #name ": " #arguments},
#include "kernels.def"
    {NULL, NULL, 0, NULL},
};

// The table as it was built.
static const char table[] =
#define KERNEL(name, arguments) "KERNEL(" #name ", " #arguments ")\n"
#include "kernels.def"
    ;

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "native", .m_size = -1, .m_methods = methods};

// The names of the sets that this processor runs, the fastest first, which is used until another one is.
static PyObject *names_of_sets(void) {
    PyObject *names = PyList_New(0);
    for (size_t i = 0; names && i < sizeof sets / sizeof *sets; i++) {
        if (!sets[i]->runs()) continue;
        PyObject *name = PyUnicode_FromString(sets[i]->set);
        if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
        Py_XDECREF(name);
        used = used ? used : sets[i];
    }
    return names;
}

// `sets` says which kernels the processor can run, `table` which there are and what each takes.
PyMODINIT_FUNC PyInit_native(void) {
    PyObject *made = PyModule_Create(&module), *names = names_of_sets();
    if (made && (!names || PyModule_AddObjectRef(made, "sets", names) < 0 || PyModule_AddStringConstant(made, "table", table) < 0)) Py_CLEAR(made);
    Py_XDECREF(names);
    return made;
}

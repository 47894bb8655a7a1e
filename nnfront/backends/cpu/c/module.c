// SPDX-License-Identifier: Apache-2.0
// The module nnfront.backends.cpu.native. Its threads are those of the OpenMP that torch runs on: there is no second pool beside it.

#include <stdarg.h>
#include <stdio.h>

#include "native.h"

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*Number)(void);

static Parallel parallel;
static Number thread_count;

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

const char no_memory[] = "out of memory";

const char *refused(const char *format, ...) {
    static _Thread_local char text[160];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    return text;
}

#if HAS_KERNELS

static PyObject *result(const char *why) {
    if (!why) Py_RETURN_NONE;
    return why == no_memory ? PyErr_NoMemory() : PyErr_Format(PyExc_ValueError, "%s", why);
}

#endif

static bool read_number(PyObject *arg, bool is_real, Py_ssize_t *number) {
    if (is_real) {
        const float value = (float)PyFloat_AsDouble(arg);
        *number = 0;
        memcpy(number, &value, sizeof value);
    } else {
        *number = PyLong_AsSsize_t(arg);
    }
    return !PyErr_Occurred();
}

static bool read_numbers(const char *name, PyObject *const *args, Py_ssize_t given, Py_ssize_t *numbers, int count, bool has_real) {
    if (given != count) {
        PyErr_Format(PyExc_TypeError, "%s takes %d numbers, got %zd", name, count, given);
        return false;
    }
    for (int i = 0; i < count; i++)
        if (!read_number(args[i], has_real && i == count - 1, numbers + i)) return false;
    return true;
}

static PyObject *use_openmp(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t n[2];
    if (!read_numbers("use_openmp", args, count, n, 2, false)) return NULL;
    parallel = (Parallel)n[0], thread_count = (Number)n[1];
    Py_RETURN_NONE;
}

#define METHOD(name, does) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, #name does}

#if HAS_KERNELS

// The kernels: how many numbers each takes, whether the last one is a float, and what it does.
#define KERNELS(K) \
    K(append_and_attend, 18, true, "(q, k, v, keys, values, lengths, y, batch, groups, shared, size, capacity, window, next_q, next_k, next_v, " \
                                   "threads, scale): attention of one token, which is stored before") \
    K(gate, 5, false, "(both, y, rows, size, activation): y = activation(first half of both) * second half") \
    K(multiply, 10, false, "(weight, x, bias, added, y, rows, columns, outputs, is_wide, threads): y = x @ weight.T + bias + added") \
    K(multiply_gated, 9, false, "(weight, x, bias, y, rows, columns, outputs, activation, threads): y = activation(first half of x @ weight.T " \
                                "+ bias) * second half") \
    K(multiply_quantized, 13, false, "(stored, codes, scales, zeros, x, bias, added, y, rows, columns, outputs, group, threads): multiply with codes") \
    K(rms_norm, 8, true, "(x, added, total, weight, y, rows, size, epsilon): y = total * weight / sqrt(mean(total^2) + epsilon), where total " \
                         "is x + added; without added, x") \
    K(rotate, 9, false, "(x, cos, sin, y, rows, heads, size, next_row, next_table): y = x * cos + x with its halves swapped * sin")

#define CALL(name, numbers, has_real, does) \
    static PyObject *call_##name(PyObject *self, PyObject *const *args, Py_ssize_t count) { \
        Py_ssize_t n[numbers]; \
        if (!read_numbers(#name, args, count, n, numbers, has_real)) return NULL; \
        const char *why; \
        Py_BEGIN_ALLOW_THREADS \
        why = name(n); \
        Py_END_ALLOW_THREADS \
        return result(why); \
    }
KERNELS(CALL)
#undef CALL

#define ENTRY(name, numbers, has_real, does) name,
static Kernel *const kernels[] = {KERNELS(ENTRY)};
#undef ENTRY

// A row of a sequence: a kernel, which of its numbers are places, and its numbers. A place is an address by its index, and bytes behind it.
enum { ROW = 20, MOST_NUMBERS = ROW - 2, OFFSET_BITS = 40 };

static const char *run_rows(const Py_ssize_t *row, Py_ssize_t rows, const Py_ssize_t *addresses) {
    for (; rows > 0; rows--, row += ROW) {
        Py_ssize_t n[MOST_NUMBERS];
        for (int i = 0; i < MOST_NUMBERS; i++) {
            const Py_ssize_t number = row[2 + i];
            n[i] = row[1] >> i & 1 ? addresses[number >> OFFSET_BITS] + (number & (((Py_ssize_t)1 << OFFSET_BITS) - 1)) : number;
        }
        const char *why = kernels[row[0]](n);
        if (why) return why;
    }
    return NULL;
}

static PyObject *run_sequence(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t n[2], *addresses;
    if (count < 2) return PyErr_Format(PyExc_TypeError, "run_sequence takes at least 2 numbers, got %zd", count);
    if (!read_numbers("run_sequence", args, 2, n, 2, false)) return NULL;
    if (!(addresses = PyMem_Malloc((size_t)(count - 1) * sizeof *addresses))) return PyErr_NoMemory();
    const char *why = NULL;
    bool is_read = true;
    for (Py_ssize_t i = 2; i < count && is_read; i++) is_read = read_number(args[i], false, addresses + i - 2);
    if (is_read) {
        Py_BEGIN_ALLOW_THREADS
        why = run_rows((const Py_ssize_t *)n[0], n[1], addresses);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(addresses);
    return is_read ? result(why) : NULL;
}

#endif

static PyMethodDef methods[] = {
    METHOD(use_openmp, "(GOMP_parallel, omp_get_num_threads): run on these threads, by addresses"),
#if HAS_KERNELS
#define DEFINE(name, numbers, has_real, does) {#name, (PyCFunction)(void (*)(void))call_##name, METH_FASTCALL, #name does},
    KERNELS(DEFINE)
#undef DEFINE
    METHOD(run_sequence, "(rows, count, *addresses): run kernels one after the other, each a row of numbers at an address"),
#endif
    {NULL, NULL, 0, NULL},
};

static bool is_able(void) {
#if HAS_KERNELS
    return __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

#if HAS_KERNELS
#define NAME(name, numbers, has_real, does) #name "/" #numbers " "
static const char names[] = KERNELS(NAME);
#undef NAME
#else
static const char names[] = "";
#endif

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "native", .m_size = -1, .m_methods = methods};

// `is_able` says whether the processor can run the kernels, `kernels` which there are and how many numbers each takes.
PyMODINIT_FUNC PyInit_native(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && (PyModule_AddIntConstant(made, "is_able", is_able()) < 0 || PyModule_AddStringConstant(made, "kernels", names) < 0)) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}

// SPDX-License-Identifier: Apache-2.0
// The module nnfront.runtime.cpu.native. Its threads are those of the OpenMP that torch runs on: there is no second pool beside it.

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

static bool read_all(PyObject *const *args, Py_ssize_t *numbers, int count) {
    for (int i = 0; i < count; i++) {
        numbers[i] = PyLong_AsSsize_t(args[i]);
        if (numbers[i] == -1 && PyErr_Occurred()) return false;
    }
    return true;
}

bool read_numbers(const char *name, PyObject *const *args, Py_ssize_t given, Py_ssize_t *numbers, int count) {
    if (given == count) return read_all(args, numbers, count);
    PyErr_Format(PyExc_TypeError, "%s takes %d numbers, got %zd", name, count, given);
    return false;
}

bool read_numbers_and_real(const char *name, PyObject *const *args, Py_ssize_t given, Py_ssize_t *numbers, int count, float *real) {
    if (given == count + 1) {
        *real = (float)PyFloat_AsDouble(args[count]);
        return !PyErr_Occurred() && read_all(args, numbers, count);
    }
    PyErr_Format(PyExc_TypeError, "%s takes %d numbers, got %zd", name, count + 1, given);
    return false;
}

static PyObject *use_openmp(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t n[2];
    if (!read_numbers("use_openmp", args, count, n, 2)) return NULL;
    parallel = (Parallel)n[0], thread_count = (Number)n[1];
    Py_RETURN_NONE;
}

#define METHOD(name, does) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, #name does}

static PyMethodDef methods[] = {
    METHOD(use_openmp, "(GOMP_parallel, omp_get_num_threads): run on these threads, by addresses"),
#if HAS_KERNELS
    METHOD(append_and_attend, "(q, k, v, keys, values, lengths, y, batch, groups, shared, size, capacity, window, next_q, next_k, "
                              "next_v, threads, scale): attention of one token, which is stored before"),
    METHOD(rms_norm, "(x, added, total, weight, y, rows, size, epsilon): y = total * weight / sqrt(mean(total^2) + epsilon), where total is x + added; "
                     "without added, x"),
    METHOD(rotate, "(x, cos, sin, y, rows, heads, size, next_row, next_table): y = x * cos + x with its halves swapped * sin"),
    METHOD(multiply, "(weight, x, bias, added, y, rows, columns, outputs, is_wide, threads): y = x @ weight.T + bias + added"),
    METHOD(multiply_gated, "(weight, x, bias, y, rows, columns, outputs, activation, threads): y = activation(first half of x @ weight.T "
                           "+ bias) * second half"),
    METHOD(multiply_quantized, "(stored, codes, scales, zeros, x, bias, y, rows, columns, outputs, group, threads): the same with codes"),
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

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "native", .m_size = -1, .m_methods = methods};

// `is_able` says whether the processor can run the kernels.
PyMODINIT_FUNC PyInit_native(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "is_able", is_able()) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}

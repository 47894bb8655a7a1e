// SPDX-License-Identifier: Apache-2.0
// Products of a few rows with a bfloat16 weight, for processors that multiply bfloat16 in pairs (AVX512_BF16: Zen 4, Cooper Lake and later).
//
// A product of few rows takes as long as reading its weight. A kernel that widens bfloat16 to float32 first is slower than the memory;
// one instruction for 32 products is not. Each row of the weight is read once, in order, and multiplied with all rows of x meanwhile.
//
// Threads are those of the OpenMP that torch runs on: `use_openmp` takes its entry points, so there is no second pool beside it.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#define FAST __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define INLINE static inline __attribute__((always_inline))

enum {
    LANES = 32,                // bfloat16 values in a vector
    MOST_ROWS = 8,             // rows of x
    MOST_WIDE = 4,             // rows of the weight at a time
    MOST_SUMS = 24,            // rows of x times rows of the weight, so that all stay in registers
    NEAR = 7 << 10,            // elements of x that the nearest cache holds beside what passes through it
    WORTH_A_THREAD = 1 << 15,  // elements of the weight below which waking threads costs more than they save
};

typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*Number)(void);

static Parallel parallel;
static Number thread_number, thread_count;

typedef struct {
    const uint16_t *weight;  // [outputs, columns]
    const uint16_t *x;       // [rows, columns]
    const uint16_t *bias;    // [outputs] or NULL
    void *y;                 // [rows, outputs], float if is_wide, else bfloat16
    Py_ssize_t rows, columns, outputs;
    bool is_wide;
} Product;

INLINE float widened(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// To the nearest, ties to even; a NaN stays one.
INLINE uint16_t rounded(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// LANES values, or the first of them that `there` marks.
FAST INLINE __m512bh values(const uint16_t *from, const bool is_whole, __mmask32 there) {
    return (__m512bh)(is_whole ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16(there, from));
}

// Add to `sums` what LANES columns of `wide` rows of the weight and all rows of x contribute.
FAST INLINE void add(__m512 *sums, const uint16_t *weight, const uint16_t *x, Py_ssize_t columns, const int rows,
                     const int wide, const bool is_whole, __mmask32 there) {
    __m512bh some[MOST_WIDE];
#pragma GCC unroll 4
    for (int j = 0; j < wide; j++) some[j] = values(weight + j * columns, is_whole, there);
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++) {
        const __m512bh with = values(x + row * columns, is_whole, there);
#pragma GCC unroll 4
        for (int j = 0; j < wide; j++) sums[row * wide + j] = _mm512_dpbf16_ps(sums[row * wide + j], some[j], with);
    }
}

// `wide` outputs of all rows of x; `rows` and `wide` are constants wherever this is inlined.
FAST INLINE void tile(const Product *p, Py_ssize_t at, const int rows, const int wide) {
    const uint16_t *weight = p->weight + at * p->columns;
    const Py_ssize_t whole = p->columns / LANES * LANES;
    __m512 sums[MOST_SUMS];
#pragma GCC unroll 32
    for (int i = 0; i < rows * wide; i++) sums[i] = _mm512_setzero_ps();
    for (Py_ssize_t i = 0; i < whole; i += LANES) add(sums, weight + i, p->x + i, p->columns, rows, wide, true, 0);
    if (whole < p->columns) {
        const __mmask32 rest = ((__mmask32)1 << (p->columns - whole)) - 1;
        add(sums, weight + whole, p->x + whole, p->columns, rows, wide, false, rest);
    }
#pragma GCC unroll 4
    for (int j = 0; j < wide; j++) {
        const float bias = p->bias ? widened(p->bias[at + j]) : 0.0f;
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            const float sum = _mm512_reduce_add_ps(sums[row * wide + j]) + bias;
            const Py_ssize_t to = row * p->outputs + at + j;
            if (p->is_wide)
                ((float *)p->y)[to] = sum;
            else
                ((uint16_t *)p->y)[to] = rounded(sum);
        }
    }
}

FAST static void outputs(const Product *p, Py_ssize_t at, Py_ssize_t end) {
    // One row of the weight after the other is the order that memory likes best, as long as x is in the nearest cache.
    const bool is_near = p->rows * p->columns <= NEAR;
#define ROWS(rows, wide) \
    case rows: \
        for (; !is_near && at + wide <= end; at += wide) tile(p, at, rows, wide); \
        for (; at < end; at++) tile(p, at, rows, 1); \
        break;
    switch (p->rows) { ROWS(1, 4) ROWS(2, 4) ROWS(3, 4) ROWS(4, 4) ROWS(5, 4) ROWS(6, 4) ROWS(7, 3) ROWS(8, 3) }
#undef ROWS
}

static void share_of_thread(void *product) {
    const Product *p = product;
    const Py_ssize_t each = (p->outputs + thread_count() - 1) / thread_count();
    const Py_ssize_t first = thread_number() * each, end = first + each;
    outputs(p, first < p->outputs ? first : p->outputs, end < p->outputs ? end : p->outputs);
}

static PyObject *multiply(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t numbers[9];
    if (count != 9) return PyErr_Format(PyExc_TypeError, "multiply takes 9 numbers, got %zd", count);
    for (int i = 0; i < 9; i++) {
        numbers[i] = PyLong_AsSsize_t(args[i]);
        if (numbers[i] == -1 && PyErr_Occurred()) return NULL;
    }
    Product p = {
        (const uint16_t *)numbers[0], (const uint16_t *)numbers[1], (const uint16_t *)numbers[2], (void *)numbers[3],
        numbers[4], numbers[5], numbers[6], numbers[7] != 0,
    };
    const unsigned threads = (unsigned)numbers[8];
    if (p.rows < 1 || p.rows > MOST_ROWS) return PyErr_Format(PyExc_ValueError, "1 to 8 rows, got %zd", p.rows);
    Py_BEGIN_ALLOW_THREADS
    if (parallel && threads > 1 && p.outputs * p.columns >= WORTH_A_THREAD)
        parallel(share_of_thread, &p, threads, 0);
    else
        outputs(&p, 0, p.outputs);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *use_openmp(PyObject *self, PyObject *args) {
    Py_ssize_t start, number, size;
    if (!PyArg_ParseTuple(args, "nnn:use_openmp", &start, &number, &size)) return NULL;
    parallel = (Parallel)start, thread_number = (Number)number, thread_count = (Number)size;
    Py_RETURN_NONE;
}

static bool is_able(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
}

static PyMethodDef methods[] = {
    {"multiply", (PyCFunction)(void (*)(void))multiply, METH_FASTCALL,
     "multiply(weight, x, bias, y, rows, columns, outputs, is_wide, threads): y = x @ weight.T + bias, by addresses; bias may be 0."},
    {"use_openmp", use_openmp, METH_VARARGS,
     "use_openmp(GOMP_parallel, omp_get_thread_num, omp_get_num_threads): run on these threads, by addresses."},
    {NULL, NULL, 0, NULL},
};

#else

enum { MOST_ROWS = 0 };
static int is_able(void) { return 0; }
static PyMethodDef methods[] = {{NULL, NULL, 0, NULL}};

#endif

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "native", .m_size = -1, .m_methods = methods};

// `most_rows` says how many rows `multiply` takes: 0 where the processor cannot run it.
PyMODINIT_FUNC PyInit_native(void) {
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "most_rows", is_able() ? MOST_ROWS : 0) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}

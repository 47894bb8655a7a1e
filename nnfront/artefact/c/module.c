// SPDX-License-Identifier: Apache-2.0
// The module nnfront.artefact.native: `crc32(data, crc)`, where the processor has the instructions. Without the GIL.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "crc32.h"

static PyObject *crc32(PyObject *self, PyObject *args) {
    Py_buffer data;
    unsigned int crc;
    if (!PyArg_ParseTuple(args, "y*I", &data, &crc)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    crc = crc32_of(data.buf, (size_t)data.len, crc);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyMethodDef methods[] = {
    {"crc32", crc32, METH_VARARGS, "(data, crc): the CRC-32 of bytes behind others that have `crc`, as zlib has it"},
    {NULL, NULL, 0, NULL},
};
static PyMethodDef none[] = {{NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "native", .m_size = -1};

PyMODINIT_FUNC PyInit_native(void) {
    module.m_methods = crc32_runs() ? methods : none;
    return PyModule_Create(&module);
}

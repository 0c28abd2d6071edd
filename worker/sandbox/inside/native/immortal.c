/* Makes every object of the warm interpreter immortal, so that a program that uses one does not write to it: counting its
 * references would make the kernel copy its page. Python from 3.12 on leaves the count of an immortal object alone.
 *
 * All that is lost is the end of these objects: a program that deletes a module of the zygote does not get its memory back,
 * which it shares with the zygote anyway. Code that looks for the only reference to an object, to change it in place, sees
 * many. An object that is missed here costs a page, nothing else. */
#include "zygote.h"
#include <Python.h>

#if PY_VERSION_HEX >= 0x030C0000 && PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)

#define MAX_OBJECTS ((size_t)1 << 22)
#define TABLE_SIZE (2 * MAX_OBJECTS)

/* Untouched pages of both use no memory. */
static struct found {
    PyObject *table[TABLE_SIZE];  /* a hash set */
    PyObject *objects[MAX_OBJECTS]; /* the same, in the order in which they were found */
    size_t count;
} *found;

static int add(PyObject *object, void *Py_UNUSED(context)) {
    if (!object || found->count == MAX_OBJECTS)
        return 0;
    size_t at = (uintptr_t)object >> 6; /* neighbours stay together, so that few pages of the table are used */
    while (found->table[at % TABLE_SIZE])
        if (found->table[at++ % TABLE_SIZE] == object)
            return 0;
    found->table[at % TABLE_SIZE] = found->objects[found->count++] = object;
    return 0;
}

static int add_root(PyObject *object, void *Py_UNUSED(context)) {
    add(object, NULL);
    return 1; /* go on */
}

/* Code objects have no `tp_traverse`. */
static void add_parts_of_code(PyCodeObject *code) {
    PyObject *parts[] = {code->co_consts, code->co_names, code->co_exceptiontable, code->co_localsplusnames, code->co_localspluskinds,
                         code->co_filename, code->co_name, code->co_qualname, code->co_linetable};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        add(parts[i], NULL);
}

/* Static types are not collected, so `tp_traverse` must not be called. */
static void add_parts_of_static_type(PyTypeObject *type) {
    PyObject *dict = PyType_GetDict(type);
    add(dict, NULL);
    Py_XDECREF(dict);
    add(type->tp_mro, NULL);
    add(type->tp_bases, NULL);
}

/* The `tp_traverse` of a dict leaves out keys that are strings. */
static void add_keys(PyObject *dict) {
    PyObject *key;
    for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, NULL);)
        add(key, NULL);
}

static void add_parts(PyObject *object) {
    add((PyObject *)Py_TYPE(object), NULL);
    if (PyObject_IS_GC(object) && Py_TYPE(object)->tp_traverse)
        Py_TYPE(object)->tp_traverse(object, add, NULL);
    else if (PyType_Check(object))
        add_parts_of_static_type((PyTypeObject *)object);
    else if (PyCode_Check(object))
        add_parts_of_code((PyCodeObject *)object);
    if (PyDict_Check(object))
        add_keys(object);
}

long make_all_immortal(void) {
    found = mmap(NULL, sizeof *found, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED)
        return 0;
    PyUnstable_GC_VisitObjects(add_root, NULL);
    for (size_t i = 0; i < found->count; i++)
        add_parts(found->objects[i]);
    size_t count = found->count;
    for (size_t i = 0; i < count; i++)
        Py_SET_REFCNT(found->objects[i], _Py_IMMORTAL_REFCNT);
    munmap(found, sizeof *found);
    return (long)count;
}

#else

long make_all_immortal(void) { return 0; }

#endif

/* An allocator for a program's first small objects: close together, on pages of their own.
 *
 * Python's pools are large, at least one for each object size, and partly used before the fork: a child's first object of
 * each size would make the kernel copy two pages. A pool here is 16 times smaller, so that all sizes share a few pages.
 * Larger objects, and all objects when the area is full, go to Python's own allocator. (sys.getallocatedblocks() does not
 * count objects in this area.) With the inherited library text (huge_pages.c) it saves 9 % of a short call's CPU time.
 *
 * Called with the interpreter's lock held. From 3.12 on a program may have several interpreters with a lock each: only the
 * main one uses the area. Off from 3.14 on, where it was not tested. */
#include "zygote.h"
#include <Python.h>

#define AREA_BYTES ((size_t)256 << 10)
#define POOL_BYTES ((uintptr_t)1024)
#define STEP ((size_t)16) /* sizes are rounded up to a multiple */
#define MOST ((size_t)512)

#if PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED)

struct pool {
    size_t size; /* of its blocks */
    size_t unused; /* aligns the blocks */
};

struct block {
    struct block *next;
};

static char *area, *next_pool, *area_end;
static struct block *free_blocks[MOST / STEP + 1];
static PyMemAllocatorEx usual;

#if PY_VERSION_HEX < 0x030C0000
static int holds_lock(void) { return 1; }
#else
static PyInterpreterState *main_interpreter;

static int holds_lock(void) {
#if PY_VERSION_HEX < 0x030D0000
    PyThreadState *thread = _PyThreadState_UncheckedGet();
#else
    PyThreadState *thread = PyThreadState_GetUnchecked();
#endif
    return thread && thread->interp == main_interpreter;
}
#endif

static int is_ours(const void *p) { return (uintptr_t)p - (uintptr_t)area < AREA_BYTES; }

static struct pool *pool_of(void *p) { return (struct pool *)((uintptr_t)p & ~(POOL_BYTES - 1)); }

/* Links all blocks of a new pool at once: they are on one page. */
static struct block *new_pool(size_t kind) {
    if (next_pool == area_end)
        return NULL;
    struct pool *pool = (struct pool *)next_pool;
    next_pool += POOL_BYTES;
    pool->size = kind * STEP;
    char *first = (char *)(pool + 1), *last = first;
    for (; last + 2 * pool->size <= next_pool; last += pool->size)
        ((struct block *)last)->next = (struct block *)(last + pool->size);
    ((struct block *)last)->next = NULL;
    return (struct block *)first;
}

static void *take(void *context, size_t size) {
    size_t kind = (size + STEP - 1) / STEP;
    if (size - 1 < MOST && holds_lock()) {
        struct block *block = free_blocks[kind];
        if (block || (block = new_pool(kind))) {
            free_blocks[kind] = block->next;
            return block;
        }
    }
    return usual.malloc(context, size);
}

static void *take_zeroed(void *context, size_t count, size_t each) {
    if (!each || count > MOST / each)
        return usual.calloc(context, count, each);
    void *p = take(context, count * each);
    return p ? memset(p, 0, count * each) : NULL;
}

static void give_back(void *context, void *p) {
    if (!is_ours(p)) {
        usual.free(context, p);
        return;
    }
    if (!holds_lock())
        return; /* lost; no interpreter frees what another one has allocated */
    struct block **list = &free_blocks[pool_of(p)->size / STEP];
    ((struct block *)p)->next = *list;
    *list = p;
}

static void *resize(void *context, void *p, size_t size) {
    if (!p)
        return take(context, size);
    if (!is_ours(p))
        return usual.realloc(context, p, size);
    size_t before = pool_of(p)->size;
    if (size <= before && size > before - before / 4)
        return p;
    void *other = take(context, size);
    if (!other)
        return NULL;
    memcpy(other, p, size < before ? size : before);
    give_back(context, p);
    return other;
}

void small_objects_prepare(void) {
    PyMemAllocatorEx of_objects;
    PyMem_GetAllocator(PYMEM_DOMAIN_MEM, &usual);
    PyMem_GetAllocator(PYMEM_DOMAIN_OBJ, &of_objects);
    if (memcmp(&usual, &of_objects, sizeof usual))
        return; /* not Python's own allocator; this one is optional */
    char *raw = mmap(NULL, AREA_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED)
        return;
#if PY_VERSION_HEX >= 0x030C0000
    main_interpreter = PyInterpreterState_Main();
#endif
    area = next_pool = area_end = raw;
    PyMemAllocatorEx ours = {usual.ctx, take, take_zeroed, resize, give_back};
    PyMem_SetAllocator(PYMEM_DOMAIN_MEM, &ours);
    PyMem_SetAllocator(PYMEM_DOMAIN_OBJ, &ours);
}

void small_objects_open(void) {
    if (area)
        area_end = area + AREA_BYTES;
}

#else

void small_objects_prepare(void) {}
void small_objects_open(void) {}

#endif

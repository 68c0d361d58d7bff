/* A libcudart that a test can load: the calls that kvtier binds, on plain host memory.

   -DRUNTIME_VERSION=13000   what it says it is, which decides the form of cudaMemcpyBatchAsync
   -DDRIVER_VERSION=13000    0: no driver
   -DHAS_DRIVER_QUERY=1      whether the driver can be asked for a function by version

   Everything happens at once. `fake_last_batch` tells how the last batch came in: 9 through the
   driver, 109 and 108 through the runtime with nine and eight arguments. */

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef void *stream_t;
typedef void *event_t;
struct location { int type, number; };
struct attributes { int order; struct location source, target; unsigned flags; };

int fake_last_batch, fake_last_order, fake_pending, fake_next_code;
unsigned fake_last_register_flags, fake_last_stream_flags, fake_last_event_flags;
stream_t fake_last_stream;

static int answer(int code) {
    if (code == 0) { code = fake_next_code; fake_next_code = 0; }
    if (code != 0) fake_pending = code;
    return code;
}

int cudaRuntimeGetVersion(int *version) { *version = RUNTIME_VERSION; return 0; }
int cudaDriverGetVersion(int *version) { *version = DRIVER_VERSION; return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return answer(0); }
int cudaSetDevice(int device) { return answer(device == 0 ? 0 : 101); }
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
    if (attribute == 134) return answer(1); /* Not known to this version. */
    *value = attribute == 91 ? 1 : attribute;
    if (attribute == 99) *value = 1;
    return answer(0);
}
int cudaDeviceGetPCIBusId(char *text, int size, int device) {
    strncpy(text, "0000:1B:00.0", (size_t)size);
    return answer(0);
}
int cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *free_bytes = (size_t)5 << 30; *total = (size_t)9 << 30; return answer(0);
}
int cudaGetLastError(void) { int code = fake_pending; fake_pending = 0; return code; }
int cudaDeviceGetStreamPriorityRange(int *low, int *high) { *low = 0; *high = -5; return answer(0); }
int cudaStreamCreateWithPriority(stream_t *stream, unsigned flags, int priority) {
    fake_last_stream_flags = flags; *stream = (stream_t)0x7ff0deadbeef; return answer(0);
}
int cudaStreamDestroy(stream_t stream) { return answer(0); }
int cudaStreamSynchronize(stream_t stream) { return answer(0); }
int cudaStreamWaitEvent(stream_t stream, event_t event, unsigned flags) { return answer(0); }
int cudaEventCreateWithFlags(event_t *event, unsigned flags) {
    fake_last_event_flags = flags; *event = (event_t)0x7ff0feedf00d; return answer(0);
}
int cudaEventDestroy(event_t event) { return answer(0); }
int cudaEventRecord(event_t event, stream_t stream) { return answer(0); }
int cudaEventQuery(event_t event) { return answer(0); }
int cudaEventElapsedTime(float *ms, event_t a, event_t b) { *ms = 2.5f; return answer(0); }
int cudaMalloc(void **address, size_t size) { *address = malloc(size); return answer(0); }
int cudaFree(void *address) { free(address); return answer(0); }
int cudaHostRegister(void *address, size_t size, unsigned flags) {
    fake_last_register_flags = flags; return answer(0);
}
int cudaHostUnregister(void *address) { return answer(0); }
int cudaHostGetDevicePointer(void **seen, void *host, unsigned flags) {
    *seen = (char *)host + ((size_t)1 << 45); return answer(0);
}
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, stream_t stream) {
    fake_last_stream = stream;
    int code = answer(0);
    if (code == 0) memcpy(to, from, size);
    return code;
}

static int copy_all(void **to, void **from, size_t *sizes, size_t count, struct attributes *a,
                    size_t *first, size_t attribute_count, stream_t stream) {
    fake_last_order = a->order;
    fake_last_stream = stream;
    if (attribute_count != 1 || first[0] != 0 || a->flags != 1) return answer(1);
    for (size_t i = 0; i < count; i++) memcpy(to[i], from[i], sizes[i]);
    return answer(0);
}

#if RUNTIME_VERSION >= 13000
int cudaMemcpyBatchAsync(void **to, void **from, size_t *sizes, size_t count, struct attributes *a,
                         size_t *first, size_t attribute_count, stream_t stream) {
    fake_last_batch = 108;
    return copy_all(to, from, sizes, count, a, first, attribute_count, stream);
}
#elif RUNTIME_VERSION >= 12080
int cudaMemcpyBatchAsync(void **to, void **from, size_t *sizes, size_t count, struct attributes *a,
                         size_t *first, size_t attribute_count, size_t *failed, stream_t stream) {
    fake_last_batch = 109;
    *failed = (size_t)-1;
    return copy_all(to, from, sizes, count, a, first, attribute_count, stream);
}
#endif

#if HAS_DRIVER_QUERY
static int driver_batch(void **to, void **from, size_t *sizes, size_t count, struct attributes *a,
                        size_t *first, size_t attribute_count, size_t *failed, stream_t stream) {
    fake_last_batch = 9;
    *failed = (size_t)-1;
    return copy_all(to, from, sizes, count, a, first, attribute_count, stream);
}
static int module_load(void **module, const char *image) { *module = (void *)7; return answer(0); }
static int module_function(void **function, void *module, const char *name) {
    *function = (void *)9; return answer(module == (void *)7 && !strcmp(name, "add") ? 0 : 500);
}
static int launch(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                  unsigned bz, unsigned shared, stream_t stream, void **arguments, void **extra) {
    /* The "kernel": *arguments[0] = arguments[1] + grid x block. */
    unsigned long long *target = *(unsigned long long **)arguments[0];
    *target = *(unsigned long long *)arguments[1] + gx * gy * gz * bx * by * bz;
    return answer(0);
}
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                     unsigned long long flags, int *status) {
    *status = 1;
    *function = NULL;
    if (!strcmp(name, "cuMemcpyBatchAsync")) {
        if (version != 12080) return answer(1); /* Version 13 of it has eight arguments. */
        *function = (void *)driver_batch;
    }
    if (!strcmp(name, "cuModuleLoadData")) *function = (void *)module_load;
    if (!strcmp(name, "cuModuleGetFunction")) *function = (void *)module_function;
    if (!strcmp(name, "cuLaunchKernel")) *function = (void *)launch;
    if (*function) *status = 0;
    return answer(0);
}
#endif

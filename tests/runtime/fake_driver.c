/* A CUDA driver for one imaginary GPU of architecture 9.0, enough for cuda-python to run on a machine without one.
 *
 * Device memory is host memory. One kernel exists, gather_rows_kernel over float32 rows of WIDTH columns, whose
 * parameters are laid out as its stored record says. Launches and copies between buffers are recorded while the stream
 * captures and run when the graph is launched. Everything else that is asked for succeeds and does nothing.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WIDTH 64
#define THREADS 128
enum { INVALID_VALUE = 1, CAPTURE_UNSUPPORTED = 900 };

struct work {
    float *source, *gathered;
    int64_t *rows;
    int nodes, count, lanes_times_count, copy_bytes;
};

static struct work recorded[64];
static int capturing, records;
static size_t shared_limit;
static void *context;

static void run(struct work w) {
    if (w.copy_bytes) {
        memcpy(w.gathered, w.source, w.copy_bytes);
        return;
    }
    for (int target = 0; target < w.lanes_times_count; target++)
        for (int column = 0; column < WIDTH; column++) {
            int64_t row = w.rows[target], origin = (int64_t)(target / w.count) * w.nodes + row;
            w.gathered[target * WIDTH + column] = row < 0 ? 0 : w.source[origin * WIDTH + column];
        }
}

static int submit(struct work w) {
    if (capturing)
        recorded[records++] = w;
    else
        run(w);
    return 0;
}

static int launch(const char *kernel, unsigned grid, unsigned threads, unsigned shared, void **p) {
    if (strcmp(kernel, "gather_rows_kernel") || threads != THREADS || shared > shared_limit) return INVALID_VALUE;
    struct work w = {*(float **)p[0], *(float **)p[4], *(int64_t **)p[1], *(int *)p[2], *(int *)p[3], grid, 0};
    return submit(w);
}

int fake_cuDriverGetVersion(int *v) { return *v = 13040, 0; }
int fake_cuDeviceGetCount(int *n) { return *n = 1, 0; }
int fake_cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int fake_cuDevicePrimaryCtxRetain(void **c, int device) { return *c = &context, 0; }
int fake_cuCtxGetCurrent(void **c) { return *c = context, 0; }
int fake_cuCtxSetCurrent(void *c) { return context = c, 0; }
int fake_cuCtxGetDevice(int *device) { return *device = 0, 0; }
int fake_cuStreamCreateWithPriority(void **s, unsigned flags, int priority) { return *s = &capturing, 0; }
int fake_cuGetErrorName(int status, const char **name) { return *name = "FAKE_ERROR", 0; }
int fake_cuGetErrorString(int status, const char **text) { return *text = "refused by the fake driver", 0; }

int fake_cuDeviceGetAttribute(int *value, int attribute, int device) {
    enum { PROCESSORS = 16, MAJOR = 75, MINOR = 76 };
    return *value = attribute == MAJOR ? 9 : attribute == MINOR ? 0 : attribute == PROCESSORS ? 132 : 1, 0;
}

int fake_cuMemAllocFromPoolAsync(void **p, size_t size, void *pool, void *stream) {
    *p = malloc(size);
    memset(*p, 0xCD, size);
    return capturing ? CAPTURE_UNSUPPORTED : 0;
}
int fake_cuMemsetD8Async(void *p, unsigned char value, size_t size, void *s) { return memset(p, value, size), 0; }
int fake_cuMemcpyHtoDAsync(void *to, void *from, size_t size, void *s) {
    return capturing ? CAPTURE_UNSUPPORTED : (memcpy(to, from, size), 0);
}
int fake_cuMemcpyDtoHAsync(void *to, void *from, size_t size, void *s) {
    return fake_cuMemcpyHtoDAsync(to, from, size, s);
}
int fake_cuMemcpyDtoDAsync(void *to, void *from, size_t size, void *s) {
    struct work w = {from, to, NULL, 0, 0, 0, (int)size};
    return submit(w);
}
int fake_cuStreamSynchronize(void *s) { return capturing ? CAPTURE_UNSUPPORTED : 0; }

int fake_cuLibraryLoadData(void **library, const void *code) {
    return *library = &recorded, memcmp(code, "\x7f" "ELF", 4) ? INVALID_VALUE : 0;
}
int fake_cuLibraryGetKernel(void **kernel, void *library, const char *name) { return *kernel = strdup(name), 0; }
int fake_cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
    enum { MAX_DYNAMIC_SHARED_SIZE_BYTES = 8 };
    return attribute == MAX_DYNAMIC_SHARED_SIZE_BYTES ? (shared_limit = value, 0) : INVALID_VALUE;
}
int fake_cuLaunchKernelEx(const unsigned *config, const char *kernel, void **parameters, void **extra) {
    return launch(kernel, config[0], config[3], config[6], parameters);
}
int fake_cuLaunchKernel(const char *kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                        unsigned shared, void *stream, void **parameters, void **extra) {
    return launch(kernel, x, threads, shared, parameters);
}

int fake_cuStreamBeginCapture(void *stream, int mode) { return records = 0, capturing = 1, 0; }
int fake_cuStreamEndCapture(void *stream, void **graph) { return *graph = &recorded, capturing = 0, 0; }
int fake_cuStreamIsCapturing(void *stream, int *status) { return *status = capturing, 0; }
int fake_cuStreamGetCaptureInfo(void *stream, int *status, uint64_t *id, void **graph, const void ***dependencies,
                                const void **edges, size_t *count) {
    *status = capturing;
    if (id) *id = 1;
    if (graph) *graph = &recorded;
    if (count) *count = 0;
    return 0;
}
int fake_cuGraphInstantiateWithParams(void **executable, void *graph, void *parameters) {
    return *executable = &recorded, 0;
}
int fake_cuGraphInstantiate(void **executable, void *graph, unsigned long long flags) { return *executable = &recorded, 0; }
int fake_cuGraphLaunch(void *executable, void *stream) {
    for (int i = 0; i < records; i++) run(recorded[i]);
    return 0;
}

static int succeed(void) { return 0; }

int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status) {
    char name[256];
    snprintf(name, sizeof name, "fake_%s", symbol);
    void *self = dlopen("libcuda.so.1", RTLD_LAZY), *found = dlsym(self, name);
    if (getenv("FAKE_DRIVER_TRACE")) fprintf(stderr, "%s%s\n", symbol, found ? " (fake)" : "");
    *function = found ? found : (void *)succeed;
    if (!strcmp(symbol, "cuGetProcAddress")) *function = (void *)cuGetProcAddress_v2;
    if (status) *status = 0;
    return 0;
}

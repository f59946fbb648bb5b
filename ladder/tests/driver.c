// What cuda_launch.py calls of NVIDIA's driver, with the driver's signatures: it writes down what it is given.
#include <string.h>

typedef void* handle;

struct Record {
    int ordinal, launches, grid[3], block[3], shared, allowed, causal, group;
    handle stream, function, context;
    void* q;
    float scale;
    char name[64], code[4];
} record;

int failure;  // what the next launch returns

int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int* device, int ordinal) { record.ordinal = ordinal; *device = 40 + ordinal; return 0; }
int cuDevicePrimaryCtxRetain(handle* context, int device) { *context = (handle)(long)(1000 + device); return 0; }
int cuCtxSetCurrent(handle context) { record.context = context; return 0; }
int cuModuleLoadData(handle* module, const void* image) { memcpy(record.code, image, 4); *module = (handle)7; return 0; }
int cuModuleGetFunction(handle* function, handle module, const char* name) {
    strncpy(record.name, name, 63);
    *function = (handle)(70 + (long)module);
    return 0;
}
int cuFuncGetAttribute(int* value, int attribute, handle function) {
    *value = (int)(long)function * 100 + attribute;
    return 0;
}
int cuFuncSetAttribute(handle function, int attribute, int value) {
    if (attribute != 8) return 1;
    record.allowed = value;
    return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    *value = attribute == 97 ? 232448 : 0;
    return 0;
}
int cuGetErrorString(int status, const char** words) { *words = status == 9 ? "invalid configuration" : "unknown"; return 0; }

// The arguments of step 9's kernels: five pointers, group, n, scale, causal.
int cuLaunchKernel(handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, handle stream, void** arguments, void** extra) {
    if (failure || extra) return failure ? failure : 1;
    const int sizes[] = {gx, gy, gz, bx, by, bz};
    memcpy(record.grid, sizes, sizeof sizes);
    record.shared = shared;
    record.stream = stream;
    record.function = function;
    record.q = *(void**)arguments[0];
    record.group = *(int*)arguments[5];
    record.scale = *(float*)arguments[7];
    record.causal = *(int*)arguments[8];
    record.launches++;
    return 0;
}

// NVML's symbols, as far as the product calls them. The file $NVML_STATE says what they answer: lines "KEY NUMBER",
// where KEY is a SYMBOL.error (its return code), a SYMBOL.hang (it does not return), or DEVICE.QUANTITY.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long u64;

static u64 of(const char *prefix, const char *key, u64 otherwise) {
    char wanted[256], found[256];
    u64 value;
    snprintf(wanted, sizeof wanted, "%s.%s", prefix, key);
    const char *path = getenv("NVML_STATE");
    FILE *file = path ? fopen(path, "r") : 0;
    while (file && fscanf(file, "%255s %llu", found, &value) == 2)
        if (!strcmp(found, wanted)) otherwise = value;
    if (file) fclose(file);
    return otherwise;
}
static u64 device(void *handle, const char *key, u64 otherwise) {
    char number[] = {(char)('0' + (long)handle - 1), 0};
    return of(number, key, otherwise);
}
#define SYMBOL(name, parameters, ...)                                   \
    int name parameters {                                               \
        while (of(#name, "hang", 0)) usleep(10000);                     \
        int error = (int)of(#name, "error", 0);                         \
        if (error) return error;                                        \
        __VA_ARGS__;                                                    \
        return 0;                                                       \
    }
#define NUMBER(name, key, otherwise) SYMBOL(name, (void *d, unsigned *found), *found = device(d, key, otherwise))

SYMBOL(nvmlInitWithFlags, (unsigned flags))
SYMBOL(nvmlShutdown, (void))
SYMBOL(nvmlSystemGetDriverVersion, (char *text, unsigned size), snprintf(text, size, "580.95.05"))
SYMBOL(nvmlSystemGetProcessName, (unsigned pid, char *text, unsigned size), snprintf(text, size, "/opt/bin/python3"))
SYMBOL(nvmlDeviceGetCount_v2, (unsigned *found), *found = of("system", "devices", 2))
SYMBOL(nvmlDeviceGetHandleByIndex_v2, (unsigned index, void **d), if (device((void *)(long)(index + 1), "lost", 0))
       return 15; *d = (void *)(long)(index + 1))
SYMBOL(nvmlDeviceGetHandleByPciBusId_v2, (const char *address, void **d), *d = (void *)(long)(atoi(address) + 1))
SYMBOL(nvmlDeviceGetUUID, (void *d, char *text, unsigned size), snprintf(text, size, "GPU-%ld", (long)d - 1))
SYMBOL(nvmlDeviceGetName, (void *d, char *text, unsigned size), snprintf(text, size, "NVIDIA H100 80GB HBM3"))
SYMBOL(nvmlDeviceGetUtilizationRates, (void *d, unsigned *rates), rates[0] = device(d, "busy", 97); rates[1] = 0)
NUMBER(nvmlDeviceGetPowerUsage, "milliwatts", 650000)
NUMBER(nvmlDeviceGetComputeMode, "mode", 0)
SYMBOL(nvmlDeviceGetClockInfo, (void *d, int kind, unsigned *found), *found = device(d, "megahertz", 1980))
SYMBOL(nvmlDeviceGetTemperature, (void *d, int kind, unsigned *found), *found = device(d, "celsius", 61))
SYMBOL(nvmlDeviceGetCurrentClocksThrottleReasons, (void *d, u64 *found), *found = device(d, "slowed", 0))
SYMBOL(nvmlDeviceGetTotalEccErrors, (void *d, int kind, int counter, u64 *found),
       *found = kind == 1 && counter == 0 ? device(d, "ecc", 0) : 99)
SYMBOL(nvmlDeviceGetMemoryInfo, (void *d, u64 *found), found[0] = 85520809984ULL; found[2] = device(d, "used", 4194304))
SYMBOL(nvmlDeviceGetMemoryInfo_v2, (void *d, u64 *found), found[1] = 85520809984ULL; found[4] = device(d, "used", 4194304))
SYMBOL(nvmlDeviceGetCudaComputeCapability, (void *d, int *major, int *minor), *major = 9; *minor = 0)

struct process { unsigned pid; u64 used; unsigned gpu, compute; };
SYMBOL(nvmlDeviceGetComputeRunningProcesses_v3, (void *d, unsigned *count, struct process *found),
       unsigned room = *count; *count = device(d, "processes", 0); if (room < *count) return 7;
       for (unsigned each = 0; each < *count; each++) found[each].pid = 4242 + each)

struct field { unsigned id, scope; long long time, latency; int kind, error; u64 value; };
SYMBOL(nvmlDeviceGetFieldValues, (void *d, int count, struct field *found),
       for (int each = 0; each < count; each++) { found[each].error = each ? 0 : 3; found[each].value = device(d, "nvlink", 0); })

static u64 seen;
struct event { void *d; u64 kind, data; unsigned gpu, compute; };
SYMBOL(nvmlEventSetCreate, (void **set), *set = &seen)
SYMBOL(nvmlDeviceRegisterEvents, (void *d, u64 kinds, void *set), if (kinds != 8) return 2)
SYMBOL(nvmlEventSetWait_v2, (void *set, struct event *found, unsigned milliseconds), u64 xid = of("system", "xid", 0);
       if (xid == seen) return 10; seen = xid; found->data = xid)

/* A stand-in for libnvidia-ml.so.1 that answers from a text file of `key=value` lines.
 *
 * TRLFIT_NVML_STUB names the file; it is read again when it changes, so a test can make a card
 * busy, hot or dead while a program watches. Keys: `driver`, `cuda`, `init` (return code of
 * nvmlInit), `cards`; per card `0.name`, `0.uuid`, `0.total_mib`, ...; per MIG slice
 * `0.mig.1.name`, ... What the file does not say is NOT_SUPPORTED. `0.error=15` makes every call
 * on card 0 fail with that code, `0.error.nvmlDeviceGetName=3` one call, `0.handle=15` the handle.
 *
 * -DOLD_DRIVER leaves out what drivers before 450 did not have. Structures follow nvml.h.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, ARGUMENT_VERSION_MISMATCH = 25,
};
#define MIB (1024ull * 1024ull)
#define MAX_CARDS 16
#define MAX_SLICES 7
#define NOT_AVAILABLE 0xffffffffffffffffull

typedef struct { int card, slice; } Handle;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } Process;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} Pci;
typedef struct {
    unsigned multiprocessors, copy, decoder, encoder, jpeg, ofa, gpu_slices, compute_slices;
    unsigned long long memory_mib;
} Attributes;

static Handle handles[MAX_CARDS][MAX_SLICES + 1];
static int opened, calls;
static char text[1 << 16];
static struct timespec read_at;

/* For the tests: how often init outnumbers shutdown, and calls on cards since the last question. */
int stub_opened(void) { return opened; }
int stub_calls(void) { int n = calls; calls = 0; return n; }

static void refresh(void) {
    const char *path = getenv("TRLFIT_NVML_STUB");
    struct stat now;
    if (!path || stat(path, &now)) { text[0] = 0; return; }
    if (now.st_mtim.tv_sec == read_at.tv_sec && now.st_mtim.tv_nsec == read_at.tv_nsec) return;
    read_at = now.st_mtim;
    FILE *file = fopen(path, "r");
    size_t length = file ? fread(text + 1, 1, sizeof text - 2, file) : 0;
    text[0] = '\n';
    text[length + 1] = 0;
    if (file) fclose(file);
}

/* The value of a key, in a buffer that the next call but seven overwrites; NULL when absent. */
static const char *look(const char *key) {
    static char values[8][4096];
    static int turn;
    char wanted[256];
    refresh();
    int length = snprintf(wanted, sizeof wanted, "\n%s=", key);
    const char *found = strstr(text, wanted);
    if (!found) return NULL;
    found += length;
    char *value = values[turn++ % 8];
    snprintf(value, sizeof values[0], "%.*s", (int)strcspn(found, "\n"), found);
    return value;
}

static long number(const char *key, long fallback) {
    const char *value = look(key);
    return value ? strtol(value, NULL, 0) : fallback;
}

static const char *of(const Handle *h, const char *field) {
    char key[256];
    if (h->slice < 0) snprintf(key, sizeof key, "%d.%s", h->card, field);
    else snprintf(key, sizeof key, "%d.mig.%d.%s", h->card, h->slice, field);
    return look(key);
}

static long number_of(const Handle *h, const char *field, long fallback) {
    const char *value = of(h, field);
    return value ? strtol(value, NULL, 0) : fallback;
}

static int refuse(const Handle *h, const char *function) {
    char key[256];
    calls++;
    if (!opened) return UNINITIALIZED;
    if (!h) return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "%d.error", h->card);
    int code = (int)number(key, 0);
    if (code) return code;
    snprintf(key, sizeof key, "%d.error.%s", h->card, function);
    return (int)number(key, 0);
}

#define GUARD(h) do { int code_ = refuse(h, __func__); if (code_) return code_; } while (0)

static int put_text(const Handle *h, const char *field, char *out, unsigned size) {
    const char *value = of(h, field);
    if (!value) return NOT_SUPPORTED;
    if (strlen(value) >= size) return INSUFFICIENT_SIZE;
    strcpy(out, value);
    return SUCCESS;
}

static int put_number(const Handle *h, const char *field, unsigned *out) {
    if (!of(h, field)) return NOT_SUPPORTED;
    *out = (unsigned)number_of(h, field, 0);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    int code = (int)number("init", 0);
    if (code) return code;
    for (int i = 0; i < MAX_CARDS; i++)
        for (int j = 0; j <= MAX_SLICES; j++) handles[i][j] = (Handle){i, j - 1};
    opened++;
    return SUCCESS;
}

int nvmlShutdown(void) {
    if (!opened) return UNINITIALIZED;
    opened--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) { (void)code; return "stub error"; }

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    const char *value = look("driver");
    if (!opened) return UNINITIALIZED;
    snprintf(out, size, "%s", value ? value : "");
    return value ? SUCCESS : NOT_SUPPORTED;
}

int nvmlSystemGetCudaDriverVersion(int *out) {
    if (!opened) return UNINITIALIZED;
    *out = (int)number("cuda", 0);
    return *out ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetCount_v2(unsigned *out) {
    if (!opened) return UNINITIALIZED;
    long count = number("cards", 0);
    if (count < 0) return (int)-count;
    *out = (unsigned)count;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle **out) {
    char key[64];
    if (!opened) return UNINITIALIZED;
    if (index >= (unsigned)number("cards", 0)) return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "%u.handle", index);
    *out = &handles[index][0];
    return (int)number(key, 0);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Handle **out) {
    if (!opened) return UNINITIALIZED;
    for (int i = 0; i < number("cards", 0); i++)
        for (int j = 0; j <= MAX_SLICES; j++) {
            const char *own = of(&handles[i][j], "uuid");
            if (own && !strcmp(own, uuid)) { *out = &handles[i][j]; return SUCCESS; }
        }
    return NOT_FOUND;
}

int nvmlDeviceGetName(Handle *h, char *out, unsigned size) {
    GUARD(h);
    return put_text(h, "name", out, size);
}

int nvmlDeviceGetUUID(Handle *h, char *out, unsigned size) {
    GUARD(h);
    return put_text(h, "uuid", out, size);
}

int nvmlDeviceGetMemoryInfo(Handle *h, Memory *out) {
    GUARD(h);
    if (!of(h, "total_mib")) return NOT_SUPPORTED;
    /* The first version counts the driver's own share as used. */
    out->total = number_of(h, "total_mib", 0) * MIB;
    out->used = (number_of(h, "used_mib", 0) + number_of(h, "reserved_mib", 0)) * MIB;
    out->free = out->total - out->used;
    return SUCCESS;
}

int nvmlDeviceGetCudaComputeCapability(Handle *h, int *major, int *minor) {
    GUARD(h);
    const char *value = of(h, "capability");
    return value && sscanf(value, "%d.%d", major, minor) == 2 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetCurrPcieLinkGeneration(Handle *h, unsigned *out) {
    GUARD(h);
    return put_number(h, "generation", out);
}

int nvmlDeviceGetCurrPcieLinkWidth(Handle *h, unsigned *out) {
    GUARD(h);
    return put_number(h, "width", out);
}

static void put_bus(Pci *out, unsigned bus) {
    memset(out, 0, sizeof *out);
    out->bus = bus;
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", bus);
    snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "0000:%02X:00.0", bus);
}

int nvmlDeviceGetPciInfo_v3(Handle *h, Pci *out) {
    GUARD(h);
    if (!of(h, "bus")) return NOT_SUPPORTED;
    put_bus(out, (unsigned)number_of(h, "bus", 0));
    return SUCCESS;
}

/* `0.links=switch off bus:0x41 ...`: what each NVLink leads to. */
static int link_end(const Handle *h, unsigned link, char *out) {
    const char *value = of(h, "links");
    if (!value) return NOT_SUPPORTED;
    while (link-- && value) value = strchr(value, ' ') ? strchr(value, ' ') + 1 : NULL;
    if (!value) return INVALID_ARGUMENT;
    sscanf(value, "%31s", out);
    return SUCCESS;
}

int nvmlDeviceGetNvLinkState(Handle *h, unsigned link, unsigned *active) {
    char end[32];
    GUARD(h);
    int code = link_end(h, link, end);
    if (!code) *active = strcmp(end, "off") != 0;
    return code;
}

int nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle *h, unsigned link, Pci *out) {
    char end[32];
    GUARD(h);
    int code = link_end(h, link, end);
    if (code) return code;
    put_bus(out, strcmp(end, "switch") ? (unsigned)strtol(end + 4, NULL, 0) : 0xf0 + link % 4);
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(Handle *h, Utilization *out) {
    GUARD(h);
    out->memory = 0;
    return put_number(h, "utilisation", &out->gpu);
}

int nvmlDeviceGetTemperature(Handle *h, int sensor, unsigned *out) {
    (void)sensor;
    GUARD(h);
    return put_number(h, "temperature", out);
}

int nvmlDeviceGetPowerUsage(Handle *h, unsigned *out) {
    GUARD(h);
    return put_number(h, "power_mw", out);
}

int nvmlDeviceGetEnforcedPowerLimit(Handle *h, unsigned *out) {
    GUARD(h);
    return put_number(h, "limit_mw", out);
}

int nvmlDeviceGetComputeMode(Handle *h, unsigned *out) {
    GUARD(h);
    return put_number(h, "compute_mode", out);
}

int nvmlDeviceGetVirtualizationMode(Handle *h, unsigned *out) {
    GUARD(h);
    return put_number(h, "virtualization", out);
}

/* `0.processes=4242:20000 99:na`: pid and MiB. */
static int put_processes(const Handle *h, const char *field, unsigned *count, Process *out) {
    const char *value = of(h, field);
    unsigned long pid;
    char memory[32];
    unsigned length = 0;
    int used;
    if (!value) value = "";
    if (!strcmp(value, "none")) return NOT_SUPPORTED;
    for (; sscanf(value, "%lu:%31s%n", &pid, memory, &used) == 2; value += used, length++)
        if (out && length < *count)
            out[length] = (Process){
                (unsigned)pid,
                strcmp(memory, "na") ? strtoull(memory, NULL, 10) * MIB : NOT_AVAILABLE,
                0xffffffff, 0xffffffff,
            };
    int code = length > *count ? INSUFFICIENT_SIZE : SUCCESS;
    *count = length;
    return code;
}

int nvmlDeviceGetComputeRunningProcesses_v2(Handle *h, unsigned *count, Process *out) {
    GUARD(h);
    return put_processes(h, "processes", count, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v2(Handle *h, unsigned *count, Process *out) {
    GUARD(h);
    return put_processes(h, "graphics", count, out);
}

#ifndef OLD_DRIVER

int nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }

int nvmlDeviceGetMemoryInfo_v2(Handle *h, MemoryV2 *out) {
    GUARD(h);
    if (out->version != (sizeof *out | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    if (!of(h, "total_mib")) return NOT_SUPPORTED;
    out->total = number_of(h, "total_mib", 0) * MIB;
    out->used = number_of(h, "used_mib", 0) * MIB;
    out->reserved = number_of(h, "reserved_mib", 0) * MIB;
    out->free = out->total - out->used - out->reserved;
    return SUCCESS;
}

int nvmlDeviceGetNvLinkRemoteDeviceType(Handle *h, unsigned link, unsigned *out) {
    char end[32];
    GUARD(h);
    int code = link_end(h, link, end);
    if (!code) *out = strcmp(end, "switch") ? 0 : 2;
    return code;
}

int nvmlDeviceGetMigMode(Handle *h, unsigned *current, unsigned *pending) {
    GUARD(h);
    *pending = 0;
    return put_number(h, "mig", current);
}

int nvmlDeviceGetMaxMigDeviceCount(Handle *h, unsigned *out) {
    GUARD(h);
    *out = of(h, "mig") ? MAX_SLICES : 0;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Handle *h, unsigned index, Handle **out) {
    GUARD(h);
    if (index >= MAX_SLICES) return INVALID_ARGUMENT;
    *out = &handles[h->card][index + 1];
    return of(*out, "uuid") ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetGpuInstanceId(Handle *h, unsigned *out) {
    GUARD(h);
    return put_number(h, "gpu_instance", out);
}

int nvmlDeviceGetComputeInstanceId(Handle *h, unsigned *out) {
    GUARD(h);
    return put_number(h, "compute_instance", out);
}

int nvmlDeviceGetAttributes_v2(Handle *h, Attributes *out) {
    GUARD(h);
    memset(out, 0, sizeof *out);
    return put_number(h, "compute_slices", &out->compute_slices);
}

int nvmlDeviceGetComputeRunningProcesses_v3(Handle *h, unsigned *count, Process *out) {
    GUARD(h);
    return put_processes(h, "processes", count, out);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(Handle *h, unsigned *count, Process *out) {
    GUARD(h);
    return put_processes(h, "graphics", count, out);
}

#endif

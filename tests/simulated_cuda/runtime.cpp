// SPDX-License-Identifier: Apache-2.0
// The functions of libcudart that torch calls, for devices whose memory is the host's and that run no kernel.
//
// Preloaded, they come before those of the real library. Everything is finished when it returns: a stream is a name, an
// event a time. `operators.cpp` computes; it is loaded here, when torch first asks how many devices there are.

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define CUDA(name, ...) EXPORTED cudaError_t name(__VA_ARGS__)

// ---- Waits: what makes the host wait for the device is reported to a function of Python ----

using Listener = void (*)(const char* kind, const char* operation);
static Listener listener = nullptr;
EXPORTED void simulated_cuda_listen(Listener function) { listener = function; }
EXPORTED void simulated_cuda_waited(const char* kind, const char* operation) {
    if (listener) listener(kind, operation);
}

// ---- Devices ----

static thread_local int current_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;

static cudaError_t failed(cudaError_t error) { return last_error = error; }

static long setting(const char* name, long otherwise) {
    const char* value = std::getenv(name);
    return value && *value ? std::atol(value) : otherwise;
}

static int count_devices() {
    const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
    const bool is_hidden = visible && (*visible == '\0' || *visible == '-');
    return is_hidden ? 0 : setting("SIMULATED_CUDA_DEVICES", 1);
}

static const int num_devices = count_devices();
static const size_t capacity = size_t(setting("SIMULATED_CUDA_MEMORY_MB", 80 * 1024)) << 20;
static const int kMajor = 9, kMultiprocessors = 132, kThreads = 1024, kWarp = 32, kSharedMemory = 232448;

CUDA(cudaGetDeviceCount, int* count) {
    static std::once_flag loaded;
    std::call_once(loaded, [] {
        const char* path = std::getenv("SIMULATED_CUDA_OPERATORS");
        if (path && !dlopen(path, RTLD_NOW | RTLD_GLOBAL)) {
            std::fprintf(stderr, "The simulated CUDA device cannot compute: %s\n", dlerror());
            std::abort();
        }
    });
    *count = num_devices;
    return num_devices ? cudaSuccess : failed(cudaErrorNoDevice);
}

CUDA(cudaGetDevice, int* device) { return *device = current_device, cudaSuccess; }

CUDA(cudaSetDevice, int device) {
    if (device < 0 || device >= num_devices) return failed(cudaErrorInvalidDevice);
    return current_device = device, cudaSuccess;
}

CUDA(cudaGetDeviceProperties, cudaDeviceProp* properties, int device) {
    if (device < 0 || device >= num_devices) return failed(cudaErrorInvalidDevice);
    *properties = {};
    std::strcpy(properties->name, "Simulated GPU");
    properties->totalGlobalMem = capacity;
    properties->major = kMajor;
    properties->multiProcessorCount = kMultiprocessors;
    properties->warpSize = kWarp;
    properties->maxThreadsPerBlock = kThreads;
    properties->maxThreadsPerMultiProcessor = 2 * kThreads;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = kSharedMemory;
    properties->sharedMemPerMultiprocessor = kSharedMemory + 1024;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 64 << 10;
    properties->maxBlocksPerMultiProcessor = 32;
    properties->l2CacheSize = 50 << 20;
    properties->unifiedAddressing = 1;
    for (int axis : {0, 1, 2}) {
        properties->maxThreadsDim[axis] = axis < 2 ? kThreads : 64;
        properties->maxGridSize[axis] = axis == 0 ? 0x7fffffff : 0xffff;
    }
    return cudaSuccess;
}

CUDA(cudaDeviceGetAttribute, int* value, cudaDeviceAttr attribute, int) {
    static const std::map<int, int> known{
        {cudaDevAttrComputeCapabilityMajor, kMajor},
        {cudaDevAttrMultiProcessorCount, kMultiprocessors},
        {cudaDevAttrMaxThreadsPerBlock, kThreads},
        {cudaDevAttrWarpSize, kWarp},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, kSharedMemory},
    };
    const auto found = known.find(attribute);
    return *value = found == known.end() ? 0 : found->second, cudaSuccess;
}

CUDA(cudaDriverGetVersion, int* version) { return *version = CUDART_VERSION, cudaSuccess; }
CUDA(cudaRuntimeGetVersion, int* version) { return *version = CUDART_VERSION, cudaSuccess; }
CUDA(cudaDeviceCanAccessPeer, int* can, int, int) { return *can = 0, cudaSuccess; }
CUDA(cudaDeviceEnablePeerAccess, int, unsigned) { return cudaSuccess; }
CUDA(cudaDeviceGetStreamPriorityRange, int* least, int* greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = 0;
    return cudaSuccess;
}
CUDA(cudaDeviceGetPCIBusId, char* text, int length, int device) {
    std::snprintf(text, length, "0000:%02x:00.0", device);
    return cudaSuccess;
}
CUDA(cudaGetLastError) {
    const cudaError_t error = last_error;
    return last_error = cudaSuccess, error;
}
CUDA(cudaPeekAtLastError) { return last_error; }
CUDA(cudaProfilerStart) { return cudaSuccess; }
CUDA(cudaProfilerStop) { return cudaSuccess; }

// ---- Memory ----

namespace {
struct Allocation {
    size_t size;
    int device;  // -1: pinned memory of the host
};
std::mutex memory_mutex;
// Never destroyed: torch frees memory while the process ends
auto& allocations = *new std::map<const char*, Allocation>;
std::map<int, size_t>& allocated = *new std::map<int, size_t>;

cudaError_t allocate(void** pointer, size_t size, int device) {
    std::lock_guard<std::mutex> guard(memory_mutex);
    if (device >= 0 && allocated[device] + size > capacity) return failed(cudaErrorMemoryAllocation);
    *pointer = std::aligned_alloc(512, (size + 512) / 512 * 512);
    if (!*pointer) return failed(cudaErrorMemoryAllocation);
    if (device >= 0) {
        std::memset(*pointer, 0xff, size);  // NaN in each floating-point format: nothing is zero by chance
        allocated[device] += size;
    }
    allocations[static_cast<const char*>(*pointer)] = {size, device};
    return cudaSuccess;
}

cudaError_t release(void* pointer) {
    if (!pointer) return cudaSuccess;
    std::lock_guard<std::mutex> guard(memory_mutex);
    const auto found = allocations.find(static_cast<const char*>(pointer));
    if (found == allocations.end()) return failed(cudaErrorInvalidValue);
    if (found->second.device >= 0) allocated[found->second.device] -= found->second.size;
    allocations.erase(found);
    std::free(pointer);
    return cudaSuccess;
}

cudaError_t copy(void* to, const void* from, size_t size) { return std::memmove(to, from, size), cudaSuccess; }
cudaError_t fill(void* to, int value, size_t size) { return std::memset(to, value, size), cudaSuccess; }
}  // namespace

CUDA(cudaMalloc, void** pointer, size_t size) { return allocate(pointer, size, current_device); }
CUDA(cudaMallocAsync, void** pointer, size_t size, cudaStream_t) { return allocate(pointer, size, current_device); }
CUDA(cudaMallocManaged, void** pointer, size_t size, unsigned) { return allocate(pointer, size, current_device); }
CUDA(cudaMallocHost, void** pointer, size_t size) { return allocate(pointer, size, -1); }
CUDA(cudaHostAlloc, void** pointer, size_t size, unsigned) { return allocate(pointer, size, -1); }
CUDA(cudaFree, void* pointer) { return release(pointer); }
CUDA(cudaFreeAsync, void* pointer, cudaStream_t) { return release(pointer); }
CUDA(cudaFreeHost, void* pointer) { return release(pointer); }

CUDA(cudaHostRegister, void* pointer, size_t size, unsigned) {
    std::lock_guard<std::mutex> guard(memory_mutex);
    return allocations[static_cast<const char*>(pointer)] = {size, -1}, cudaSuccess;
}
CUDA(cudaHostUnregister, void* pointer) {
    std::lock_guard<std::mutex> guard(memory_mutex);
    return allocations.erase(static_cast<const char*>(pointer)), cudaSuccess;
}

CUDA(cudaMemGetInfo, size_t* available, size_t* total) {
    std::lock_guard<std::mutex> guard(memory_mutex);
    *total = capacity;
    *available = capacity - allocated[current_device];
    return cudaSuccess;
}

CUDA(cudaPointerGetAttributes, cudaPointerAttributes* attributes, const void* pointer) {
    std::lock_guard<std::mutex> guard(memory_mutex);
    *attributes = {};
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = -2;
    attributes->hostPointer = const_cast<void*>(pointer);
    auto next = allocations.upper_bound(static_cast<const char*>(pointer));
    if (next == allocations.begin()) return cudaSuccess;
    const auto& [begin, allocation] = *std::prev(next);
    if (static_cast<const char*>(pointer) >= begin + allocation.size) return cudaSuccess;
    const bool is_device = allocation.device >= 0;
    attributes->type = is_device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->device = is_device ? allocation.device : 0;
    attributes->devicePointer = const_cast<void*>(pointer);
    if (is_device) attributes->hostPointer = nullptr;
    return cudaSuccess;
}

CUDA(cudaMemcpy, void* to, const void* from, size_t size, cudaMemcpyKind) { return copy(to, from, size); }
CUDA(cudaMemcpyAsync, void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t) {
    return copy(to, from, size);
}
CUDA(cudaMemcpyPeerAsync, void* to, int, const void* from, int, size_t size, cudaStream_t) {
    return copy(to, from, size);
}
CUDA(cudaMemset, void* to, int value, size_t size) { return fill(to, value, size); }
CUDA(cudaMemsetAsync, void* to, int value, size_t size, cudaStream_t) { return fill(to, value, size); }

// ---- Streams and events ----

static cudaError_t new_stream(cudaStream_t* stream) {
    *stream = reinterpret_cast<cudaStream_t>(new char);
    return cudaSuccess;
}
CUDA(cudaStreamCreate, cudaStream_t* stream) { return new_stream(stream); }
CUDA(cudaStreamCreateWithFlags, cudaStream_t* stream, unsigned) { return new_stream(stream); }
CUDA(cudaStreamCreateWithPriority, cudaStream_t* stream, unsigned, int) { return new_stream(stream); }
CUDA(cudaStreamDestroy, cudaStream_t) { return cudaSuccess; }
CUDA(cudaStreamQuery, cudaStream_t) { return cudaSuccess; }
CUDA(cudaStreamWaitEvent, cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
CUDA(cudaStreamGetPriority, cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
CUDA(cudaStreamIsCapturing, cudaStream_t, cudaStreamCaptureStatus* status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
// Its name and further arguments, which are read only while a graph is captured, differ between versions of CUDA
#define CAPTURE_INFO(function, name)                                                                      \
    EXPORTED cudaError_t function(cudaStream_t, cudaStreamCaptureStatus*, ...) __asm__(name);             \
    cudaError_t function(cudaStream_t, cudaStreamCaptureStatus* status, ...) {                            \
        return *status = cudaStreamCaptureStatusNone, cudaSuccess;                                        \
    }
CAPTURE_INFO(capture_info, "cudaStreamGetCaptureInfo")
CAPTURE_INFO(capture_info_v2, "cudaStreamGetCaptureInfo_v2")
CUDA(cudaThreadExchangeStreamCaptureMode, cudaStreamCaptureMode*) { return cudaSuccess; }
CUDA(cudaLaunchHostFunc, cudaStream_t, cudaHostFn_t function, void* data) { return function(data), cudaSuccess; }
CUDA(cudaStreamAddCallback, cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
    return function(stream, cudaSuccess, data), cudaSuccess;
}
CUDA(cudaStreamSynchronize, cudaStream_t) { return simulated_cuda_waited("synchronize", "stream"), cudaSuccess; }
CUDA(cudaDeviceSynchronize) { return simulated_cuda_waited("synchronize", "device"), cudaSuccess; }
CUDA(cudaEventSynchronize, cudaEvent_t) { return simulated_cuda_waited("synchronize", "event"), cudaSuccess; }

using Clock = std::chrono::steady_clock;
static Clock::time_point& time_of(cudaEvent_t event) { return *reinterpret_cast<Clock::time_point*>(event); }
static cudaError_t new_event(cudaEvent_t* event) {
    *event = reinterpret_cast<cudaEvent_t>(new Clock::time_point);
    return cudaSuccess;
}
CUDA(cudaEventCreate, cudaEvent_t* event) { return new_event(event); }
CUDA(cudaEventCreateWithFlags, cudaEvent_t* event, unsigned) { return new_event(event); }
CUDA(cudaEventDestroy, cudaEvent_t event) { return delete &time_of(event), cudaSuccess; }
CUDA(cudaEventRecord, cudaEvent_t event, cudaStream_t) { return time_of(event) = Clock::now(), cudaSuccess; }
CUDA(cudaEventRecordWithFlags, cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}
CUDA(cudaEventQuery, cudaEvent_t) { return cudaSuccess; }
CUDA(cudaEventElapsedTime, float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    *milliseconds = std::chrono::duration<float, std::milli>(time_of(end) - time_of(begin)).count();
    return cudaSuccess;
}

// ---- Kernels: none runs. torch reports the error at the operator that `operators.cpp` does not replace. ----

static cudaError_t no_kernel() { return failed(cudaErrorNoKernelImageForDevice); }
CUDA(cudaLaunchKernel, const void*, dim3, dim3, void**, size_t, cudaStream_t) { return no_kernel(); }
CUDA(cudaLaunchCooperativeKernel, const void*, dim3, dim3, void**, size_t, cudaStream_t) { return no_kernel(); }
CUDA(cudaLaunchKernelExC, const cudaLaunchConfig_t*, const void*, void**) { return no_kernel(); }
CUDA(__cudaLaunchKernel, cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return no_kernel(); }
CUDA(__cudaGetKernel, cudaKernel_t* kernel, const void* function) {
    *kernel = static_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}
CUDA(cudaFuncSetAttribute, const void*, cudaFuncAttribute, int) { return cudaSuccess; }
CUDA(cudaFuncGetAttributes, cudaFuncAttributes* attributes, const void*) {
    *attributes = {};
    attributes->maxThreadsPerBlock = kThreads;
    attributes->binaryVersion = attributes->ptxVersion = 10 * kMajor;
    return cudaSuccess;
}

// ---- The driver, by whose name this library is loaded: libcaffe2_nvrtc.so, of torch, is linked to it ----

CUDA(cudaGetDriverEntryPointByVersion, const char* name, void** function, unsigned, unsigned long long,
     cudaDriverEntryPointQueryResult* result) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

static const int kNoDevice = 100;  // CUDA_ERROR_NO_DEVICE
static void* const context = reinterpret_cast<void*>(1);
#define DRIVER(name, ...) EXPORTED int name(__VA_ARGS__)
DRIVER(cuDeviceGet, int* device, int ordinal) { return *device = ordinal, 0; }
DRIVER(cuDevicePrimaryCtxGetState, int, unsigned* flags, int* is_active) { return *flags = 0, *is_active = 1, 0; }
DRIVER(cuDevicePrimaryCtxRetain, void** retained, int) { return *retained = context, 0; }
DRIVER(cuCtxGetCurrent, void** current) { return *current = context, 0; }
DRIVER(cuCtxSetCurrent, void*) { return 0; }
#define MISSING(name) DRIVER(name) { return kNoDevice; }
MISSING(cuDeviceGetAttribute)
MISSING(cuFuncGetAttribute)
MISSING(cuFuncSetAttribute)
MISSING(cuFuncSetCacheConfig)
MISSING(cuGetErrorString)
MISSING(cuLaunchCooperativeKernel)
MISSING(cuLaunchKernel)
MISSING(cuLinkAddData_v2)
MISSING(cuLinkComplete)
MISSING(cuLinkCreate_v2)
MISSING(cuModuleGetFunction)
MISSING(cuModuleLoad)
MISSING(cuModuleLoadData)
MISSING(cuModuleLoadDataEx)
MISSING(cuModuleUnload)
MISSING(cuOccupancyMaxActiveBlocksPerMultiprocessor)
MISSING(cuPointerGetAttribute)
MISSING(cuTensorMapEncodeTiled)

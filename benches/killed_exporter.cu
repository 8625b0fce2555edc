// What becomes of memory that a process has handed to another and then dies: is it still there, whole, and is the other's context?
// CUDA promises nothing for cudaIpc; a mapping by file descriptor counts its references. Behind `Communicator::register`'s choice.
// Build: nvcc -std=c++17 -O3 -arch=sm_90 -o killed_exporter benches/killed_exporter.cu; run: ./killed_exporter [rounds, 20]
//
// Each round three processes: one fills memory on the first GPU and hands it on; one reads it over and over from the second GPU (the first,
// where there is one) while the first is killed; when it is gone a third takes all the memory that is free and fills it with other
// values, and the second reads on.
#include <cuda.h>
#include <cuda_runtime.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

constexpr size_t kBytes = size_t{64} << 20;
constexpr uint32_t kValue = 0x5157a11e, kOther = 0xdeadbeef;

static void check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
  _exit(2);
}

template <class F>
static F driver(const char* name) {
  void* f = nullptr;
  cudaDriverEntryPointQueryResult found;
  check(cudaGetDriverEntryPointByVersion(name, &f, 12000, cudaEnableDefault, &found), name);
  return reinterpret_cast<F>(f);
}
#define CALL(name, ...)                                                       \
  do {                                                                        \
    if (CUresult e = driver<decltype(&name)>(#name)(__VA_ARGS__); e != CUDA_SUCCESS) { \
      std::fprintf(stderr, #name ": %d\n", e);                                \
      _exit(2);                                                               \
    }                                                                         \
  } while (0)

__global__ void fill(uint32_t* p, size_t n, uint32_t value) {
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) p[i] = value;
}
__global__ void look(const volatile uint32_t* p, size_t n, unsigned long long* wrong) {
  unsigned long long mine = 0;
  for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) mine += p[i] != kValue;
  if (mine) atomicAdd(wrong, mine);
}

static void send_fd(int to, int fd) {
  char byte = 0, room[CMSG_SPACE(sizeof(int))] = {};
  iovec part{&byte, 1};
  msghdr m{};
  m.msg_iov = &part, m.msg_iovlen = 1, m.msg_control = room, m.msg_controllen = sizeof room;
  cmsghdr* c = CMSG_FIRSTHDR(&m);
  c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(c), &fd, sizeof fd);
  if (sendmsg(to, &m, 0) != 1) _exit(2);
}
static int receive_fd(int from) {
  char byte, room[CMSG_SPACE(sizeof(int))];
  iovec part{&byte, 1};
  msghdr m{};
  m.msg_iov = &part, m.msg_iovlen = 1, m.msg_control = room, m.msg_controllen = sizeof room;
  if (recvmsg(from, &m, 0) != 1) _exit(2);
  int fd;
  std::memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
  return fd;
}

static CUmemAllocationProp by_descriptor() {
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return p;
}
static uint32_t* map(CUmemGenericAllocationHandle handle, int device) {
  CUdeviceptr at;
  CALL(cuMemAddressReserve, &at, kBytes, 0, 0, 0);
  CALL(cuMemMap, at, kBytes, 0, handle, 0);
  CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  CALL(cuMemSetAccess, at, kBytes, &access, 1);
  return reinterpret_cast<uint32_t*>(at);
}

static void exporter(int to, bool ipc) {
  check(cudaSetDevice(0), "cudaSetDevice");
  check(cudaFree(nullptr), "a context");
  uint32_t* p = nullptr;
  CUmemGenericAllocationHandle handle{};
  if (ipc) {
    check(cudaMalloc(&p, kBytes), "cudaMalloc");
  } else {
    auto properties = by_descriptor();
    CALL(cuMemCreate, &handle, kBytes, &properties, 0);
    p = map(handle, 0);
  }
  fill<<<256, 256>>>(p, kBytes / 4, kValue);
  check(cudaDeviceSynchronize(), "fill");
  if (ipc) {
    cudaIpcMemHandle_t name;
    check(cudaIpcGetMemHandle(&name, p), "cudaIpcGetMemHandle");
    if (write(to, &name, sizeof name) != sizeof name) _exit(2);
  } else {
    int fd;
    CALL(cuMemExportToShareableHandle, &fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    send_fd(to, fd);
  }
  for (;;) pause();
}

struct Seen {
  char where[40];  // "" if nothing failed
  char error[40];
  unsigned long long looks, wrong_while_killed, wrong_when_gone, wrong_when_refilled;
};

// Reads until told by `from_parent` that the exporter is gone, then twice more, then tries its own context.
static void importer(int from, int from_parent, int to_parent, bool ipc, int device) {
  check(cudaSetDevice(device), "cudaSetDevice");
  check(cudaFree(nullptr), "a context");
  uint32_t* p = nullptr;
  if (ipc) {
    cudaIpcMemHandle_t name;
    if (read(from, &name, sizeof name) != sizeof name) _exit(2);
    check(cudaIpcOpenMemHandle(reinterpret_cast<void**>(&p), name, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  } else {
    CUmemGenericAllocationHandle handle;
    CALL(cuMemImportFromShareableHandle, &handle, reinterpret_cast<void*>(static_cast<intptr_t>(receive_fd(from))), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    p = map(handle, device);
  }
  Seen seen{};
  unsigned long long* wrong;
  check(cudaMallocManaged(&wrong, sizeof *wrong), "cudaMallocManaged");
  auto once = [&](unsigned long long& count, const char* where) {
    if (seen.where[0]) return;
    *wrong = 0;
    look<<<256, 256>>>(p, kBytes / 4, wrong);
    cudaError_t e = cudaDeviceSynchronize();
    seen.looks++;
    if (e == cudaSuccess) {
      count += *wrong;
    } else {
      std::strncpy(seen.where, where, sizeof seen.where - 1);
      std::strncpy(seen.error, cudaGetErrorName(e), sizeof seen.error - 1);
    }
  };
  once(seen.wrong_while_killed, "before");
  char word = 1;
  if (write(to_parent, &word, 1) != 1) _exit(2);
  while (recv(from_parent, &word, 1, MSG_DONTWAIT) != 1) once(seen.wrong_while_killed, "while it was killed");
  once(seen.wrong_when_gone, "when it was gone");
  if (write(to_parent, &word, 1) != 1 || read(from_parent, &word, 1) != 1) _exit(2);
  once(seen.wrong_when_refilled, "when the rest was refilled");
  if (write(to_parent, &seen, sizeof seen) != sizeof seen) _exit(2);
  _exit(0);
}

// Takes what memory is left on the first GPU, in pieces, and overwrites it.
static void refiller() {
  check(cudaSetDevice(0), "cudaSetDevice");
  void* p;
  for (size_t piece = size_t{8} << 30; piece >= (size_t{2} << 20); piece /= 2) {
    while (cudaMalloc(&p, piece) == cudaSuccess) fill<<<1024, 256>>>(static_cast<uint32_t*>(p), piece / 4, kOther);
    cudaGetLastError();
  }
  check(cudaDeviceSynchronize(), "refill");
  _exit(0);
}

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20;
  int devices = 0;
  // Counted in a process of its own: CUDA does not survive a fork.
  if (pid_t child = fork(); child == 0) {
    cudaGetDeviceCount(&devices);
    _exit(devices);
  } else {
    int status;
    waitpid(child, &status, 0);
    devices = WEXITSTATUS(status);
  }
  for (bool ipc : {true, false}) {
    int whole = 0, failed = 0;
    unsigned long long looks = 0, wrong[3] = {};
    char last[100] = "";
    for (int round = 0; round < rounds; round++) {
      int data[2], control[2];
      if (socketpair(AF_UNIX, SOCK_STREAM, 0, data) || socketpair(AF_UNIX, SOCK_STREAM, 0, control)) return 1;
      pid_t first = fork();
      if (first == 0) exporter(data[0], ipc);
      pid_t second = fork();
      if (second == 0) {
        close(control[0]);
        importer(data[1], control[1], control[1], ipc, devices > 1 ? 1 : 0);
      }
      close(control[1]);
      char word;
      Seen seen{};
      bool told = read(control[0], &word, 1) == 1;
      usleep(1000 * (round % 10));
      kill(first, SIGKILL);
      waitpid(first, nullptr, 0);
      if (told && write(control[0], &word, 1) == 1 && read(control[0], &word, 1) == 1) {
        pid_t third = fork();
        if (third == 0) refiller();
        waitpid(third, nullptr, 0);
        told = write(control[0], &word, 1) == 1 && recv(control[0], &seen, sizeof seen, MSG_WAITALL) == sizeof seen;
      } else {
        told = false;
      }
      kill(second, SIGKILL);
      waitpid(second, nullptr, 0);
      for (int fd : {data[0], data[1], control[0]}) close(fd);
      looks += seen.looks;
      wrong[0] += seen.wrong_while_killed, wrong[1] += seen.wrong_when_gone, wrong[2] += seen.wrong_when_refilled;
      if (!told || seen.where[0]) {
        failed++;
        std::snprintf(last, sizeof last, "%s %s", told ? seen.error : "no answer", seen.where);
      } else {
        whole += seen.wrong_while_killed + seen.wrong_when_gone + seen.wrong_when_refilled == 0;
      }
    }
    std::printf("%-15s %d killed: %d whole, %d failed (%s); %llu looks; wrong words while killed %llu, gone %llu, refilled %llu\n",
                ipc ? "cudaIpc" : "file descriptor", rounds, whole, failed, last, looks, wrong[0], wrong[1], wrong[2]);
    std::fflush(stdout);
  }
}

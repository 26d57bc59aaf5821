// What one launch is made of: memory slots, threads, simdgroups, and how a detector ends the launch.
// Knows nothing of Metal's types; compiled once, without instrumentation, and linked to every kernel.
#pragma once
#include <stdint.h>
#include <stddef.h>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

// Every buffer and every threadgroup array lives in the middle of its own stretch of reserved addresses, so the
// slot of an address is a shift, and an index that is wrong by less than 8 GiB still names its buffer.
constexpr u64 kSlotShift = 34, kSlotBytes = u64(1) << kSlotShift, kMiddle = kSlotBytes / 2;
constexpr u32 kDeviceSlots = 32, kThreadgroupSlots = 32, kSlots = kDeviceSlots + kThreadgroupSlots;
constexpr u32 kLanes = 32, kMaxThreads = 1024, kMaxValue = 64;
constexpr u64 kStackBytes = 128 << 10, kPage = 16 << 10;
// A stack is used from so much lower than the one before: tops at like addresses would push each other out of the cache.
constexpr u64 kStackShift = 7 * 64;

enum Kind : u32 { kInput = 0, kConstant = 1, kOutput = 2, kThreadgroup = 3 };
enum Order : u32 { kDeviceMemory = 1, kThreadgroupMemory = 2 };  // bits of metal::mem_flags

// Keep in step with FAULTS in launch.py.
enum Fault : int {
  kNone = 0, kOutOfBounds, kReadOnly, kMisaligned, kUninitialised, kUnwritten, kRace, kBarrier, kSimdDivergence,
  kTooMuchMemory, kUndefined, kWildPointer, kLaneLayout, kTooLong, kBadCall,
};

// One granule of writable memory: who wrote and who read it last, and in which barrier interval. An access is ordered
// after an earlier one if a barrier that orders this memory lies between them for both threads.
struct Cell {
  u32 write_group, write_epoch, write_simd_epoch;
  u32 read_group, read_epoch, read_simd_epoch;
  u16 write_thread, read_thread;  // index in the threadgroup; kMany: several since the last barrier
  u16 read_simdgroup;             // kMany likewise
  u8 written_atomically, read_atomically;
};
constexpr u16 kMany = 0xffff;
constexpr u32 kManyGroups = 0xffffffff;

// What Python passes in and reads back; keep in step with launch.py.
struct Buffer {
  const char* name;
  u8* data;
  u64 bytes;
  u32 element_bytes, kind, initialised, may_stay_unwritten;
  u64 loaded, stored, distinct_loaded, distinct_stored, loaded_per_threadgroup;
};
struct Limits { u32 threads, threadgroup_bytes, seconds, lane_layout_allowed; };
// Where it happened: a line of the source, or the site, an address in the kernel's file, which Python looks up.
struct Outcome {
  int fault;
  u32 groups, threads, threadgroup_bytes;
  u64 threadgroup_loaded, threadgroup_stored;
  u32 line, simd_line;  // simd_line: of the thread's latest simdgroup operation
  u64 site;
  char message[1000];
};

struct Slot {
  u64 begin, bytes;
  const char* name;
  u32 element_bytes, kind, initialised;
  u32 shift;       // a granule is 1 << shift bytes: 4, or fewer from the first access that is not made of whole ones
  Cell* cells;     // per granule, of outputs and threadgroup arrays
  u32* loaded_by;  // per granule, of buffers: serial of the last threadgroup that loaded it
  Buffer* buffer;
};

enum State : u8 { kRunning, kAtSimd, kAtBarrier, kReturned };
struct Fibre {
  void* stack_pointer;
  u8* stack;
  u32 simd_operations, line, barrier_flags;
  u16 index, simdgroup, lane;
  State state;
  const char* operation;
};
struct Simdgroup {
  u32 ready;  // bit per lane that can run
  u32 lanes, arrived, line;
  u32 epoch[4];  // simdgroup barriers passed, by the memory they order
  const char* operation;
  alignas(16) u8 in[2][kLanes * kMaxValue];
  alignas(16) u8 out[2][kLanes * kMaxValue];
};
struct Launch {
  void (*entry)(void* const*);
  void* arguments[kDeviceSlots];
  u32 grid[3], threadgroup[3], groups[3], group[3], size[3];  // size: of this threadgroup, smaller at the grid's end
  u32 serial, threads, returned, at_barrier, barrier_line, epoch[4];
  Limits limits;
  Outcome* outcome;
};

extern Launch launch;
extern u64 reserve;
extern Slot slots[kSlots];
extern Fibre fibres[kMaxThreads];
extern Simdgroup simdgroups[kMaxThreads / kLanes];
extern Fibre* current;
extern u64 failed_at;

[[noreturn]] void fail(Fault fault, u32 line, const char* format, ...) __attribute__((format(printf, 3, 4)));
void run_group();
void track(Slot& slot);
int describe_slot(char* text, size_t size, const Slot& slot, u64 address, u32 bytes);
extern "C" void shim_access(const void* address, u32 bytes, u32 alignment, u32 write, u32 atomic);

// Checks and counts every access. The compiler's thread sanitizer pass puts a call before each load and store that
// may leave the thread; these are the functions it calls, in place of the sanitizer's own.
// A load that the optimiser proved redundant or unused is not there any more, and is neither counted nor checked.
#include "state.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INLINE inline __attribute__((always_inline))  // each size of access gets its own code

int describe_slot(char* text, size_t size, const Slot& slot, u64 address, u32 bytes) {
  static const char* kinds[] = {"device input", "constant input", "device output", "threadgroup array"};
  const long long index = (long long)(address - slot.begin) >= 0
      ? (long long)((address - slot.begin) / slot.element_bytes)
      : -(long long)((slot.begin - address + slot.element_bytes - 1) / slot.element_bytes);
  return snprintf(text, size, "%u bytes at index %lld of %s '%s' (%llu elements of %u bytes)", bytes, index,
                  kinds[slot.kind], slot.name ? slot.name : "?", (unsigned long long)(slot.bytes / slot.element_bytes),
                  slot.element_bytes);
}

// Starts to keep account of a slot, in granules of 4 bytes if it is made of whole ones.
void track(Slot& slot) {
  slot.shift = u32(__builtin_ctzll(slot.bytes | 4));
  if (slot.kind >= kOutput) slot.cells = (Cell*)calloc(slot.bytes >> slot.shift, sizeof(Cell));
  if (slot.buffer) slot.loaded_by = (u32*)calloc(slot.bytes >> slot.shift, sizeof(u32));
}

// Smaller granules from now on; what was known of the larger holds for each part.
__attribute__((noinline, cold)) static void refine(Slot& slot, u32 shift) {
  Cell* cells = slot.cells;
  u32* loaded_by = slot.loaded_by;
  const u64 count = slot.bytes >> shift;
  const u32 ratio = slot.shift - shift;
  if (cells) {
    slot.cells = (Cell*)malloc(count * sizeof(Cell));
    for (u64 i = 0; i < count; i++) slot.cells[i] = cells[i >> ratio];
  }
  if (loaded_by) {
    slot.loaded_by = (u32*)malloc(count * sizeof(u32));
    for (u64 i = 0; i < count; i++) slot.loaded_by[i] = loaded_by[i >> ratio];
  }
  free(cells), free(loaded_by);
  slot.shift = shift;
}

static u64 site;  // return address of the latest access
[[noreturn]] __attribute__((noinline, cold)) static void refuse(Fault fault, const Slot& slot, u64 address, u32 bytes,
                                                                const char* format, u32 other = 0) {
  char where[300], text[200];
  describe_slot(where, sizeof where, slot, address, bytes);
  snprintf(text, sizeof text, format, other);
  failed_at = site;
  fail(fault, 0, "%s: %s", text, where);
}

namespace {
struct Access { u32 simdgroup, epoch, simd_epoch; u16 thread; };

// Is the earlier access, by `thread` of this threadgroup, ordered before the current one?
inline bool ordered(const Access& now, u16 thread, u32 epoch, u32 simd_epoch) {
  return thread == now.thread || epoch != now.epoch || (thread / kLanes == now.simdgroup && simd_epoch != now.simd_epoch);
}

INLINE void store(Slot& slot, u64 address, u32 bytes, const Access& now, bool atomic) {
  Cell* cell = slot.cells + ((address - slot.begin) >> slot.shift);
  const bool shared = slot.kind == kThreadgroup;
  for (u32 i = 0; i < bytes >> slot.shift; i++, cell++) {
    if (cell->write_group == launch.serial) {
      if (!ordered(now, cell->write_thread, cell->write_epoch, cell->write_simd_epoch) && !(atomic && cell->written_atomically))
        refuse(kRace, slot, address, bytes, "data race: store after a store by thread %u with no barrier between", cell->write_thread);
    } else if (!shared && cell->write_group && !(atomic && cell->written_atomically)) {
      refuse(kRace, slot, address, bytes, "data race: store after a store by another threadgroup");
    } else if (!shared && !cell->write_group && slot.buffer) {
      slot.buffer->distinct_stored += 1 << slot.shift;
    }
    if (cell->read_group == launch.serial) {
      const bool many = cell->read_epoch == now.epoch && (cell->read_simdgroup == kMany ||
          (cell->read_thread == kMany && (cell->read_simdgroup != now.simdgroup || cell->read_simd_epoch == now.simd_epoch)));
      const bool one = cell->read_simdgroup != kMany && cell->read_thread != kMany &&
          !ordered(now, cell->read_thread, cell->read_epoch, cell->read_simd_epoch);
      // A reader stands for its whole simdgroup once it is not the thread itself.
      if ((many || one) && !(atomic && cell->read_atomically))
        refuse(kRace, slot, address, bytes, "data race: store after a load by thread %u with no barrier between",
               cell->read_thread == kMany ? cell->read_simdgroup * kLanes : cell->read_thread);
    } else if (!shared && cell->read_group && !(atomic && cell->read_atomically)) {
      refuse(kRace, slot, address, bytes, "data race: store after a load by another threadgroup");
    }
    cell->write_group = launch.serial, cell->write_thread = now.thread;
    cell->write_epoch = now.epoch, cell->write_simd_epoch = now.simd_epoch, cell->written_atomically = atomic;
  }
}

INLINE void load(Slot& slot, u64 address, u32 bytes, const Access& now, bool atomic) {
  Cell* cell = slot.cells + ((address - slot.begin) >> slot.shift);
  const bool shared = slot.kind == kThreadgroup;
  for (u32 i = 0; i < bytes >> slot.shift; i++, cell++) {
    if (cell->write_group == launch.serial) {
      if (!ordered(now, cell->write_thread, cell->write_epoch, cell->write_simd_epoch) && !(atomic && cell->written_atomically))
        refuse(kRace, slot, address, bytes, "data race: load after a store by thread %u with no barrier between", cell->write_thread);
    } else if (!shared && cell->write_group) {
      if (!(atomic && cell->written_atomically))
        refuse(kRace, slot, address, bytes, "data race: load after a store by another threadgroup");
    } else if (!slot.initialised) {
      refuse(kUninitialised, slot, address, bytes, "load of memory that nobody has written");
    }
    if (cell->read_group != launch.serial) {
      const bool others = !shared && cell->read_group;
      cell->read_group = others ? kManyGroups : launch.serial;
      cell->read_epoch = now.epoch, cell->read_simdgroup = now.simdgroup, cell->read_simd_epoch = now.simd_epoch;
      cell->read_thread = now.thread, cell->read_atomically = atomic;
      continue;
    }
    cell->read_atomically &= u8(atomic);
    if (cell->read_epoch != now.epoch) {
      cell->read_epoch = now.epoch, cell->read_simdgroup = now.simdgroup;
      cell->read_simd_epoch = now.simd_epoch, cell->read_thread = now.thread, cell->read_atomically = atomic;
    } else if (cell->read_simdgroup != now.simdgroup) {
      cell->read_simdgroup = kMany;
    } else if (cell->read_simd_epoch != now.simd_epoch) {
      cell->read_simd_epoch = now.simd_epoch, cell->read_thread = now.thread;
    } else if (cell->read_thread != now.thread) {
      cell->read_thread = kMany;
    }
  }
}

INLINE void count_loaded(Slot& slot, u64 address, u32 bytes) {
  if (!slot.buffer) {
    launch.outcome->threadgroup_loaded += bytes;
    return;
  }
  slot.buffer->loaded += bytes;
  u32* stamp = slot.loaded_by + ((address - slot.begin) >> slot.shift);
  u32 in_group = 0, ever = 0;
  for (u32 i = 0; i < bytes >> slot.shift; i++) {
    in_group += stamp[i] != launch.serial;
    ever += stamp[i] == 0;
    stamp[i] = launch.serial;
  }
  slot.buffer->loaded_per_threadgroup += in_group << slot.shift;
  slot.buffer->distinct_loaded += ever << slot.shift;
}

// Not in a slot: the thread's own stack, or constants of the kernel's file.
__attribute__((noinline)) void thread_memory(u64 address, u32 bytes) {
  const u64 low = (u64)fibres[0].stack, high = low + (kStackBytes + kPage) * kMaxThreads;
  const u64 own = (u64)current->stack;
  failed_at = site;
  if (address < (u64(1) << 16))
    fail(kWildPointer, 0, "access of %u bytes through a null pointer (address %llu)", bytes, (unsigned long long)address);
  if (address >= low && address < high && (address < own || address >= own + kStackBytes))
    fail(kWildPointer, 0, "access of %u bytes in another thread's private memory", bytes);
  failed_at = 0;
}
}  // namespace

static INLINE void access(const void* pointer, u32 bytes, u32 alignment, u32 write, u32 atomic, void* from) {
  site = (u64)from;
  const u64 address = (u64)pointer, offset = address - reserve;
  if (offset >= kSlotBytes * kSlots) return thread_memory(address, bytes);
  Slot& slot = slots[offset >> kSlotShift];
  const u64 at = address - slot.begin;
  if (at >= slot.bytes || bytes > slot.bytes - at)
    refuse(kOutOfBounds, slot, address, bytes, write ? "store out of bounds" : "load out of bounds");
  if (address & (alignment - 1))
    refuse(kMisaligned, slot, address, bytes, write ? "misaligned store, not a multiple of %u bytes" : "misaligned load, not a multiple of %u bytes", alignment);
  if ((at | bytes) & ((u64(1) << slot.shift) - 1)) refine(slot, u32(__builtin_ctzll(at | bytes)));
  if (slot.kind < kOutput) {
    if (write) refuse(kReadOnly, slot, address, bytes, "store to an input");
    return count_loaded(slot, address, bytes);
  }
  const u32 memory = slot.kind == kThreadgroup ? kThreadgroupMemory : kDeviceMemory;
  const Access now = {current->simdgroup, launch.epoch[memory], simdgroups[current->simdgroup].epoch[memory], current->index};
  if (!write || (atomic && write == 1)) {  // 2: stored without looking
    load(slot, address, bytes, now, atomic);
    count_loaded(slot, address, bytes);
  }
  if (write) {
    store(slot, address, bytes, now, atomic);
    (slot.buffer ? slot.buffer->stored : launch.outcome->threadgroup_stored) += bytes;
  }
}

extern "C" void shim_access(const void* pointer, u32 bytes, u32 alignment, u32 write, u32 atomic) {
  access(pointer, bytes, alignment, write, atomic, __builtin_return_address(0));
}

// The 64 elements of an 8x8 matrix, each accessed by the lane that holds it: `matrix_place` of shim_matrix.h, inverted.
extern "C" void shim_matrix_access(const void* at, u64 stride, u32 transposed, u32 bytes, u32 write) {
  const u16 first = u16(current->simdgroup * kLanes);
  const Simdgroup& simdgroup = simdgroups[current->simdgroup];
  for (u32 row = 0; row < 8; row++) {
    const u64 address = (u64)at + row * stride * bytes, offset = address - reserve;
    Slot& slot = slots[offset >> kSlotShift & (kSlots - 1)];
    const u64 start = address - slot.begin;
    const bool plain = offset < kSlotBytes * kSlots && start < slot.bytes && 8 * bytes <= slot.bytes - start &&
        slot.kind >= kOutput && ((start | bytes) & ((u64(1) << slot.shift) - 1)) == 0 && address % bytes == 0;
    if (!plain) {
      for (u32 column = 0; column < 8; column++)
        access((const void*)(address + column * bytes), bytes, bytes, write, 0, __builtin_return_address(0));
      continue;
    }
    const u32 memory = slot.kind == kThreadgroup ? kThreadgroupMemory : kDeviceMemory;
    Access now = {current->simdgroup, launch.epoch[memory], simdgroup.epoch[memory], 0};
    site = (u64)__builtin_return_address(0);
    for (u32 column = 0; column < 8; column++) {
      const u32 place = transposed ? column * 8 + row : row * 8 + column;
      now.thread = u16(first + (place + 53) * 45 % 64 / 2);
      if (write) store(slot, address + column * bytes, bytes, now, false);
      else load(slot, address + column * bytes, bytes, now, false);
    }
    if (!write) count_loaded(slot, address, 8 * bytes);
    else (slot.buffer ? slot.buffer->stored : launch.outcome->threadgroup_stored) += 8 * bytes;
  }
}

// The names the sanitizer pass calls. "unaligned" means that the type promises less than its size.
#define HERE __builtin_return_address(0)
#define HOOK(name, ...) extern "C" void __tsan_##name(const void* p) { __VA_ARGS__; }
#define HOOKS(N)                                                                                               \
  HOOK(read##N, access(p, N, N, 0, 0, HERE)) HOOK(write##N, access(p, N, N, 1, 0, HERE))                       \
  HOOK(unaligned_read##N, access(p, N, 1, 0, 0, HERE)) HOOK(unaligned_write##N, access(p, N, 1, 1, 0, HERE))   \
  HOOK(read_write##N, access(p, N, N, 0, 0, HERE), access(p, N, N, 1, 0, HERE))                                \
  HOOK(unaligned_read_write##N, access(p, N, 1, 0, 0, HERE), access(p, N, 1, 1, 0, HERE))
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)

extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_read_range(const void* p, u64 n) { access(p, u32(n), 1, 0, 0, HERE); }
extern "C" void __tsan_write_range(const void* p, u64 n) { access(p, u32(n), 1, 1, 0, HERE); }
extern "C" void* __tsan_memcpy(void* to, const void* from, u64 n) {
  access(from, u32(n), 1, 0, 0, HERE), access(to, u32(n), 1, 1, 0, HERE);
  return memcpy(to, from, n);
}
extern "C" void* __tsan_memmove(void* to, const void* from, u64 n) {
  access(from, u32(n), 1, 0, 0, HERE), access(to, u32(n), 1, 1, 0, HERE);
  return memmove(to, from, n);
}
extern "C" void* __tsan_memset(void* to, int value, u64 n) {
  access(to, u32(n), 1, 1, 0, HERE);
  return memset(to, value, n);
}

// Undefined behaviour that the compiler checks by itself; the layouts are those of its ubsan runtime interface.
struct SourceLocation { const char* file; u32 line, column; };
struct TypeDescriptor { u16 kind, info; char name[1]; };
struct BoundsData { SourceLocation at; TypeDescriptor *array, *index; };
struct PointerData { SourceLocation at; TypeDescriptor* type; u8 log_alignment, kind; };
struct ArithmeticData { SourceLocation at; TypeDescriptor* type; };
extern "C" void __ubsan_handle_out_of_bounds_abort(BoundsData* d, u64 index) {
  fail(kOutOfBounds, d->at.line, "index %lld out of bounds for an array of type %s", (long long)index, d->array->name);
}
// The type's alignment, also where the optimiser narrows a vector load to the one element that is used.
extern "C" void __ubsan_handle_type_mismatch_v1_abort(PointerData* d, u64 address) {
  const u32 alignment = u32(1) << d->log_alignment;
  if (address < (u64(1) << 16)) fail(kWildPointer, d->at.line, "access through a null pointer, type %s", d->type->name);
  const u64 offset = address - reserve;
  char where[300] = "private memory";
  if (offset < kSlotBytes * kSlots) describe_slot(where, sizeof where, slots[offset >> kSlotShift], address, alignment);
  fail(kMisaligned, d->at.line, "misaligned %s, not a multiple of %u bytes: %s", d->type->name, alignment, where);
}
extern "C" void __ubsan_handle_shift_out_of_bounds_abort(ArithmeticData* d, u64, u64 by) {
  fail(kUndefined, d->at.line, "shift of a %s by %lld bits", d->type->name, (long long)by);
}
extern "C" void __ubsan_handle_divrem_overflow_abort(ArithmeticData* d, u64, u64) {
  fail(kUndefined, d->at.line, "integer division by zero or overflow in %s", d->type->name);
}
extern "C" void __ubsan_handle_builtin_unreachable(SourceLocation* at) { fail(kUndefined, at->line, "unreachable code reached"); }
extern "C" void __ubsan_handle_missing_return(SourceLocation* at) { fail(kUndefined, at->line, "function ends without a value"); }

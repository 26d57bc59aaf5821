// The threads of one threadgroup: a fibre each, simdgroups of 32 in lockstep at simd operations, barriers.
#include "state.h"
#include <string.h>

Fibre fibres[kMaxThreads];
Simdgroup simdgroups[kMaxThreads / kLanes];
Fibre* current;
static void* scheduler_stack;
constexpr u32 kMemories[] = {kDeviceMemory, kThreadgroupMemory};

// Saves the registers a callee must keep on the current stack, stores its pointer, continues on the other stack.
// swapcontext would make two system calls per switch to save a signal mask that never changes.
// One instruction a line: a semicolon starts a comment in Apple's assembler.
#if defined(__x86_64__)
__attribute__((naked, noinline)) static void switch_stack(void** /*save: rdi*/, void* /*load: rsi*/) {
  asm("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n retq");
}
constexpr u32 kSavedWords = 8, kReturnWord = 6;  // six registers, the return address, one word of alignment
#elif defined(__aarch64__)
__attribute__((naked, noinline)) static void switch_stack(void** /*save: x0*/, void* /*load: x1*/) {
  asm("sub sp, sp, #160\n"
      "stp x19, x20, [sp]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
      "stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n"
      "stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
      "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
      "ldp x19, x20, [sp]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n"
      "ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n"
      "ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
      "add sp, sp, #160\n ret");
}
constexpr u32 kSavedWords = 20, kReturnWord = 11;  // x30 is the twelfth word
#else
#error "the shim switches stacks on x86-64 and arm64 only"
#endif

// On to the next lane of this simdgroup that can run, or back to the scheduler.
static void yield() {
  Fibre* from = current;
  const Simdgroup& simdgroup = simdgroups[from->simdgroup];
  if (simdgroup.ready) {
    const u32 after = simdgroup.ready & ~((u32(2) << from->lane) - 1);
    const u32 lane = __builtin_ctz(after ? after : simdgroup.ready);
    current = &fibres[from->simdgroup * kLanes + lane];
    if (current == from) return;
    switch_stack(&from->stack_pointer, current->stack_pointer);
  } else {
    current = nullptr;
    switch_stack(&from->stack_pointer, scheduler_stack);
  }
}

static void thread_main() {
  launch.entry(launch.arguments);
  current->state = kReturned;
  launch.returned++;
  simdgroups[current->simdgroup].ready &= ~(u32(1) << current->lane);
  yield();
  __builtin_trap();
}

// Most values are of 4 bytes, which are not worth a call.
static inline void copy(void* to, const void* from, u32 bytes) {
  if (bytes == 4) {
    memcpy(to, from, 4);
  } else if (bytes) {
    memcpy(to, from, bytes);
  }
}

// A value from every lane, one function over all of them, a value to every lane. Each lane switches once per
// operation: the last to arrive goes straight on, so the values of two operations can be in flight.
extern "C" void shim_simd(const void* in, u32 in_bytes, void* result, u32 result_bytes, const char* operation, u32 line,
                          void (*combine)(const void*, void*, u32)) {
  Simdgroup& simdgroup = simdgroups[current->simdgroup];
  const u32 side = current->simd_operations++ & 1, lane = current->lane;
  current->line = line;
  if (simdgroup.arrived == 0) {
    simdgroup.operation = operation, simdgroup.line = line;
  } else if (simdgroup.line != line || (simdgroup.operation != operation && strcmp(simdgroup.operation, operation))) {
    fail(kSimdDivergence, line, "%s at line %u, while other lanes of the simdgroup are at %s, line %u", operation, line,
         simdgroup.operation, simdgroup.line);
  }
  copy(simdgroup.in[side] + lane * in_bytes, in, in_bytes);
  if (++simdgroup.arrived == simdgroup.lanes) {
    combine(simdgroup.in[side], simdgroup.out[side], simdgroup.lanes);
    simdgroup.arrived = 0;
    simdgroup.ready = u32((u64(1) << simdgroup.lanes) - 1);
    Fibre* lanes = &fibres[current->simdgroup * kLanes];
    for (u32 i = 0; i < simdgroup.lanes; i++) lanes[i].state = kRunning;
  } else {
    current->state = kAtSimd, current->operation = operation;
    simdgroup.ready &= ~(u32(1) << lane);
    yield();
  }
  copy(result, simdgroup.out[side] + lane * result_bytes, result_bytes);
}

static void nothing(const void*, void*, u32) {}
extern "C" void shim_simdgroup_barrier(u32 flags, u32 line) {
  Simdgroup& simdgroup = simdgroups[current->simdgroup];
  const bool last = simdgroup.arrived + 1 == simdgroup.lanes;
  if (last)
    for (const u32 memory : kMemories) simdgroup.epoch[memory] += (flags & memory) != 0;
  shim_simd(nullptr, 0, nullptr, 0, "simdgroup_barrier", line, nothing);
}

extern "C" void shim_threadgroup_barrier(u32 flags, u32 line) {
  if (launch.at_barrier == 0) {
    launch.barrier_line = line;
  } else if (launch.barrier_line != line) {
    fail(kBarrier, line, "threadgroup_barrier at line %u, while other threads wait at the one at line %u", line, launch.barrier_line);
  }
  if (++launch.at_barrier == launch.threads) {
    launch.at_barrier = 0;
    for (const u32 memory : kMemories) launch.epoch[memory] += (flags & memory) != 0;
    for (u32 i = 0; i < launch.threads; i++) fibres[i].state = kRunning;
    for (u32 i = 0; i * kLanes < launch.threads; i++) simdgroups[i].ready = u32((u64(1) << simdgroups[i].lanes) - 1);
    return;
  }
  current->state = kAtBarrier, current->operation = "threadgroup_barrier", current->line = line;
  simdgroups[current->simdgroup].ready &= ~(u32(1) << current->lane);
  yield();
}

// Nobody can run and not everybody has returned.
[[noreturn]] static void report_stuck() {
  u32 count[4] = {0, 0, 0, 0};
  for (u32 i = 0; i < launch.threads; i++) count[fibres[i].state]++;
  for (u32 i = 0; i < launch.threads; i++) {
    if (fibres[i].state != kAtSimd) continue;
    current = &fibres[i];
    u32 there = 0;
    const Simdgroup& simdgroup = simdgroups[current->simdgroup];
    for (u32 lane = 0; lane < simdgroup.lanes; lane++) there += fibres[current->simdgroup * kLanes + lane].state == kAtSimd;
    fail(kSimdDivergence, current->line, "%s at line %u is reached by %u of the %u lanes of simdgroup %u", current->operation,
         current->line, there, simdgroup.lanes, current->simdgroup);
  }
  for (u32 i = 0; i < launch.threads; i++)
    if (fibres[i].state == kReturned) {
      current = &fibres[i];
      break;
    }
  fail(kBarrier, launch.barrier_line, "returned, but threadgroup_barrier at line %u waits for it: reached by %u of %u threads",
       launch.barrier_line, count[kAtBarrier], launch.threads);
}

void run_group() {
  launch.serial++;
  launch.threads = launch.size[0] * launch.size[1] * launch.size[2];
  launch.returned = launch.at_barrier = 0;
  const u32 count = (launch.threads + kLanes - 1) / kLanes;
  for (u32 i = 0; i < count; i++) {
    Simdgroup& simdgroup = simdgroups[i];
    simdgroup.lanes = launch.threads - i * kLanes < kLanes ? launch.threads - i * kLanes : kLanes;
    simdgroup.ready = u32((u64(1) << simdgroup.lanes) - 1), simdgroup.arrived = 0;
  }
  for (u32 i = 0; i < launch.threads; i++) {
    Fibre& fibre = fibres[i];
    u64* top = (u64*)(fibre.stack + kStackBytes - i * kStackShift % kPage) - kSavedWords;
    memset(top, 0, kSavedWords * 8);
    top[kReturnWord] = (u64)thread_main;
    fibre.stack_pointer = top;
    fibre.index = u16(i), fibre.simdgroup = u16(i / kLanes), fibre.lane = u16(i % kLanes);
    fibre.state = kRunning, fibre.simd_operations = 0;
  }
  while (launch.returned < launch.threads) {
    bool moved = false;
    for (u32 i = 0; i < count; i++) {
      if (!simdgroups[i].ready) continue;
      moved = true;
      current = &fibres[i * kLanes + __builtin_ctz(simdgroups[i].ready)];
      switch_stack(&scheduler_stack, current->stack_pointer);
    }
    if (!moved) report_stuck();
  }
  current = nullptr;
}

// Runs a grid, one threadgroup after another: lays out its memory, ends it when a detector fires, looks at what is left.
#include "state.h"
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>

Launch launch;
u64 reserve, failed_at;
Slot slots[kSlots];
static sigjmp_buf out;
static pthread_t owner;

static u32 coordinate(u32 index, int axis) {
  const u32* size = launch.size;
  return axis == 0 ? index % size[0] : axis == 1 ? index / size[0] % size[1] : index / (size[0] * size[1]);
}

void fail(Fault fault, u32 line, const char* format, ...) {
  Outcome& outcome = *launch.outcome;
  Dl_info image;
  outcome.fault = fault, outcome.line = line, outcome.simd_line = current ? current->line : 0;
  if (failed_at && dladdr((void*)launch.entry, &image)) outcome.site = failed_at - (u64)image.dli_fbase;
  int n = 0;
  if (current)
    n = snprintf(outcome.message, sizeof outcome.message, "threadgroup (%u, %u, %u), thread (%u, %u, %u): ", launch.group[0],
                 launch.group[1], launch.group[2], coordinate(current->index, 0), coordinate(current->index, 1),
                 coordinate(current->index, 2));
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(outcome.message + n, sizeof outcome.message - n, format, arguments);
  va_end(arguments);
  siglongjmp(out, 1);  // the fibres are dropped as they stand; nothing in them needs destroying
}

extern "C" void* shim_threadgroup(u32 id, const char* name, u64 bytes, u32 element_bytes) {
  if (id >= kThreadgroupSlots) fail(kBadCall, 0, "more than %u threadgroup arrays", kThreadgroupSlots);
  Slot& slot = slots[kDeviceSlots + id];
  if (!slot.cells) {
    const u64 begin = reserve + (kDeviceSlots + id) * kSlotBytes + kMiddle;
    if (bytes > (u64(1) << 20)) fail(kTooMuchMemory, 0, "threadgroup array '%s' has %llu bytes", name, (unsigned long long)bytes);
    mmap((void*)begin, (bytes + kPage - 1) / kPage * kPage, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANON, -1, 0);
    slot = {begin, bytes, name, element_bytes, kThreadgroup, 0, 0, nullptr, nullptr, nullptr};
    track(slot);
    launch.outcome->threadgroup_bytes += u32((bytes + 15) / 16 * 16);
    if (launch.outcome->threadgroup_bytes > launch.limits.threadgroup_bytes)
      fail(kTooMuchMemory, 0, "%u bytes of threadgroup memory with array '%s'; at most %u", launch.outcome->threadgroup_bytes,
           name, launch.limits.threadgroup_bytes);
  }
  return (void*)slot.begin;
}

// out = a b + c of 8x8 matrices, row by row.
extern "C" void shim_product(const float* a, const float* b, const float* c, float* out) {
  for (u32 row = 0; row < 8; row++) {
    float sum[8];
    for (u32 column = 0; column < 8; column++) sum[column] = c[row * 8 + column];
    for (u32 k = 0; k < 8; k++)
      for (u32 column = 0; column < 8; column++) sum[column] += a[row * 8 + k] * b[k * 8 + column];
    for (u32 column = 0; column < 8; column++) out[row * 8 + column] = sum[column];
  }
}

extern "C" void shim_lane_layout(u32 line) {
  if (!launch.limits.lane_layout_allowed)
    fail(kLaneLayout, line, "thread_elements() depends on which lane holds what: an undocumented lane layout");
}
extern "C" void shim_misuse(const char* what, u32 line) { fail(kBadCall, line, "%s", what); }

extern "C" u32 shim_lane() { return current->lane; }
struct Position { u32 x, y, z; };
// Numbers as in ATTRIBUTES of source.py.
extern "C" Position shim_attribute(u32 id) {
  const u32 i = current->index, *group = launch.group, *full = launch.threadgroup, *size = launch.size;
  switch (id) {
    case 0:
      return {group[0] * full[0] + coordinate(i, 0), group[1] * full[1] + coordinate(i, 1), group[2] * full[2] + coordinate(i, 2)};
    case 1: return {launch.grid[0], launch.grid[1], launch.grid[2]};
    case 2: return {coordinate(i, 0), coordinate(i, 1), coordinate(i, 2)};
    case 3: return {i, 0, 0};
    case 4: return {size[0], size[1], size[2]};
    case 5: return {full[0], full[1], full[2]};
    case 6: return {group[0], group[1], group[2]};
    case 7: return {launch.groups[0], launch.groups[1], launch.groups[2]};
    case 8: return {i % kLanes, 0, 0};
    case 9: return {kLanes, 0, 0};
    case 10: return {i / kLanes, 0, 0};
    case 11: return {(launch.threads + kLanes - 1) / kLanes, 0, 0};
    case 12: return {(full[0] * full[1] * full[2] + kLanes - 1) / kLanes, 0, 0};
    case 13: return {i % 4, 0, 0};
    case 14: return {i / 4, 0, 0};
    default: return {(launch.threads + 3) / 4, 0, 0};
  }
}

// A wild pointer, a full stack or an endless loop arrives as a signal; on its own stack, so that a full one does no harm.
static void on_signal(int number, siginfo_t* info, void*) {
  if (!pthread_equal(pthread_self(), owner)) {
    pthread_kill(owner, number);
    return;
  }
  if (number == SIGVTALRM) fail(kTooLong, 0, "still running after %u seconds of processor time", launch.limits.seconds);
  if (number == SIGFPE || number == SIGILL) fail(kUndefined, 0, "the processor refuses an instruction (division overflow?)");
  fail(kWildPointer, 0, "wild pointer or full stack (address %p)", info->si_addr);
}

static void prepare(Buffer* buffers, u32 count) {
  void* space = mmap(nullptr, kSlotBytes * kSlots, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (space == MAP_FAILED) fail(kBadCall, 0, "cannot reserve address space");
  reserve = (u64)space;
  for (u32 i = 0; i < kSlots; i++) slots[i] = {reserve + i * kSlotBytes + kMiddle, 0, "(no buffer)", 1, kInput, 0, 0, nullptr, nullptr, nullptr};
  u8* stacks = (u8*)mmap(nullptr, (kStackBytes + kPage) * kMaxThreads, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) fail(kBadCall, 0, "cannot reserve thread stacks");
  for (u32 i = 0; i < kMaxThreads; i++) fibres[i].stack = stacks + i * (kStackBytes + kPage);
  for (u32 i = 0; i < launch.threadgroup[0] * launch.threadgroup[1] * launch.threadgroup[2]; i++)
    mprotect(fibres[i].stack + kStackBytes, kPage, PROT_NONE);  // stops the next thread's stack
  for (u32 i = 0; i < count; i++) {
    Buffer& buffer = buffers[i];
    Slot& slot = slots[i];
    slot.bytes = buffer.bytes, slot.name = buffer.name, slot.element_bytes = buffer.element_bytes, slot.kind = buffer.kind;
    slot.initialised = buffer.initialised, slot.buffer = &buffer;
    launch.arguments[i] = (void*)slot.begin;
    if (!buffer.bytes) continue;
    mmap((void*)slot.begin, (buffer.bytes + kPage - 1) / kPage * kPage, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANON, -1, 0);
    memcpy((void*)slot.begin, buffer.data, buffer.bytes);
    track(slot);
  }
}

static void run_grid(Buffer* buffers, u32 count) {
  u32 *group = launch.group, *groups = launch.groups;
  for (int axis = 0; axis < 3; axis++) groups[axis] = (launch.grid[axis] + launch.threadgroup[axis] - 1) / launch.threadgroup[axis];
  for (group[2] = 0; group[2] < groups[2]; group[2]++)
    for (group[1] = 0; group[1] < groups[1]; group[1]++)
      for (group[0] = 0; group[0] < groups[0]; group[0]++) {
        for (int axis = 0; axis < 3; axis++) {
          const u32 left = launch.grid[axis] - group[axis] * launch.threadgroup[axis];
          launch.size[axis] = left < launch.threadgroup[axis] ? left : launch.threadgroup[axis];
        }
        run_group();
        launch.outcome->groups++, launch.outcome->threads += launch.threads;
      }
  for (u32 i = 0; i < count; i++) {
    Slot& slot = slots[i];
    if (slot.kind != kOutput) continue;
    memcpy(buffers[i].data, (void*)slot.begin, slot.bytes);
    if (slot.initialised || buffers[i].may_stay_unwritten) continue;
    for (u64 byte = 0; byte < slot.bytes; byte++)
      if (!slot.cells[byte >> slot.shift].write_group) {
        char where[300];
        describe_slot(where, sizeof where, slot, slot.begin + byte, slot.element_bytes);
        fail(kUnwritten, 0, "left unwritten: %s", where);
      }
  }
}

extern "C" __attribute__((visibility("default"))) int shim_launch(void (*entry)(void* const*), Buffer* buffers, u32 count,
                                                                  const u32* grid, const u32* threadgroup,
                                                                  const Limits* limits, Outcome* outcome) {
  memset(&launch, 0, sizeof launch);
  memset(simdgroups, 0, sizeof simdgroups);
  memset(fibres, 0, sizeof fibres);
  current = nullptr, failed_at = 0;
  launch.entry = entry, launch.limits = *limits, launch.outcome = outcome;
  memcpy(launch.grid, grid, sizeof launch.grid);
  memcpy(launch.threadgroup, threadgroup, sizeof launch.threadgroup);
  owner = pthread_self();
  constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM}, kCount = 5;
  struct sigaction before[kCount], action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_signal, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  stack_t handler_stack = {}, stack_before;
  handler_stack.ss_size = 64 << 10, handler_stack.ss_sp = malloc(handler_stack.ss_size);
  sigaltstack(&handler_stack, &stack_before);
  for (int i = 0; i < kCount; i++) sigaction(kSignals[i], &action, &before[i]);
  struct itimerval timer = {}, timer_before;
  timer.it_value.tv_sec = limits->seconds;
  setitimer(ITIMER_VIRTUAL, &timer, &timer_before);
  if (sigsetjmp(out, 1) == 0) {
    prepare(buffers, count);
    run_grid(buffers, count);
  }
  setitimer(ITIMER_VIRTUAL, &timer_before, nullptr);
  for (int i = 0; i < kCount; i++) sigaction(kSignals[i], &before[i], nullptr);
  sigaltstack(&stack_before, nullptr);
  free(handler_stack.ss_sp);
  for (Slot& slot : slots) free(slot.cells), free(slot.loaded_by), slot.cells = nullptr, slot.loaded_by = nullptr;
  if (fibres[0].stack) munmap(fibres[0].stack, (kStackBytes + kPage) * kMaxThreads);
  if (reserve) munmap((void*)reserve, kSlotBytes * kSlots);
  reserve = 0;
  return outcome->fault;
}

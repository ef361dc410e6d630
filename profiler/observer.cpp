// Watches every collective that PyTorch issues, through a global RecordFunction callback.
//
// c10d opens a RecordFunction of scope USER_SCOPE for each Work: on gloo it begins and ends on the
// worker thread that runs the collective, so its times are the true ones; on NCCL it begins and ends
// on the thread that issues it, so only the issue is known here. Being C++, it sees what never passes
// through Python: DDP's reducer, FSDP's and DTensor's functional collectives.
//
// Build with -DNDEBUG: RecordFunction::inputs() otherwise asserts on inputs that were not given as
// boxed values. There is no Python in here; the loader uses ctypes.
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#if __has_include(<torch/csrc/distributed/c10d/ParamCommsUtils.hpp>)
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#define TRINE_PARAM_COMMS 1
#endif

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t kUnknown = INT64_MIN;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Mirrored by a numpy structured type in observer.py: change both, and the version below.
struct Row {
  int64_t order;        // how many collectives began before this one
  int64_t start_ns;     // steady clock
  int64_t end_ns;
  int64_t tensor_bytes; // of the tensors that c10d handed to the Work
  int64_t in_elements;  // from the collective's own description, where there is one (NCCL)
  int64_t out_elements;
  int64_t sequence;
  int64_t thread;       // kernel thread id of the start
  int32_t dtype;        // at::ScalarType, -1 unknown
  int32_t group_size;   // -1 unknown
  int32_t worker;       // 1: began on a backend's worker thread
  int32_t point_to_point;
  char name[96];
  char operation[32];
  char group[64];
};
static_assert(sizeof(Row) == 8 * 8 + 4 * 4 + 96 + 32 + 64, "keep in step with observer.py");

struct Context : public at::ObserverContext {
  Row row{};
};

// Never destroyed: worker threads may still run while the process exits.
struct State {
  std::mutex guard;
  std::vector<Row> rows;
  size_t capacity = 0;
  int64_t dropped = 0;
  int64_t started = 0;
  at::CallbackHandle handle = 0;
  bool enabled = false;
};
State& state() {
  static State* instance = new State();
  return *instance;
}

int64_t thread_id() {
  static thread_local const int64_t id = static_cast<int64_t>(::syscall(SYS_gettid));
  return id;
}

// ProcessGroupGloo names the threads that run its collectives.
bool is_gloo_worker() {
  static thread_local const bool answer = [] {
    char path[64];
    std::snprintf(path, sizeof(path), "/proc/self/task/%lld/comm", static_cast<long long>(thread_id()));
    std::ifstream file(path);
    std::string name;
    std::getline(file, name);
    return name.rfind("pt_gloo", 0) == 0;
  }();
  return answer;
}

bool names_a_backend(const char* name) {
  const char* colon = std::strchr(name, ':');
  if (colon == nullptr) return false;
  const size_t length = static_cast<size_t>(colon - name);
  for (const char* backend : {"gloo", "nccl", "xccl", "ucc", "mpi", "hccl"}) {
    if (std::strlen(backend) == length && std::strncmp(name, backend, length) == 0) return true;
  }
  return false;
}

void copy_text(char* to, size_t capacity, const std::string& from) {
  const size_t length = std::min(capacity - 1, from.size());
  std::memcpy(to, from.data(), length);
  to[length] = 0;
}

void add_tensor(Row& row, const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  row.tensor_bytes += static_cast<int64_t>(tensor.nbytes());
  row.dtype = static_cast<int32_t>(tensor.scalar_type());
}

void add_inputs(Row& row, const at::RecordFunction& function) {
  for (const c10::IValue& value : function.inputs()) {
    if (value.isTensor()) {
      add_tensor(row, value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) add_tensor(row, tensor);
    }
  }
}

#ifdef TRINE_PARAM_COMMS
// getSequenceNumber came with torch 2.12 or so; older descriptions lack it.
template <typename Info, typename = void>
struct Sequence {
  static void read(const Info&, Row&) {}
};
template <typename Info>
struct Sequence<Info, std::void_t<decltype(std::declval<const Info&>().getSequenceNumber())>> {
  static void read(const Info& info, Row& row) {
    if (info.getSequenceNumber() >= 0) row.sequence = info.getSequenceNumber();
    row.point_to_point = info.getIsP2P() ? 1 : 0;
  }
};

bool add_description(Row& row) {
  const auto* info = static_cast<const torch::ParamCommsDebugInfo*>(
      c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PARAM_COMMS_INFO));
  if (info == nullptr) return false;
  row.in_elements = info->getInMessageNelems();
  row.out_elements = info->getOutMessageNelems();
  row.dtype = static_cast<int32_t>(info->getDType());
  row.group_size = info->getWorldSize();
  copy_text(row.operation, sizeof(row.operation), info->getCollectiveName());
  copy_text(row.group, sizeof(row.group), info->getProcessGroupName());
  Sequence<torch::ParamCommsDebugInfo>::read(*info, row);
  return true;
}
#else
bool add_description(Row&) { return false; }
#endif

std::unique_ptr<at::ObserverContext> on_start(const at::RecordFunction& function) {
  const char* name = function.name();
  const bool worker = is_gloo_worker();
  const bool named = names_a_backend(name);
  // dist.record_comm gives a Work a name of the user's own; where it runs tells it from an annotation.
  if (!named && !worker &&
      c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PARAM_COMMS_INFO) == nullptr) {
    return nullptr;
  }
  auto context = std::make_unique<Context>();
  Row& row = context->row;
  row.start_ns = now_ns();
  row.end_ns = row.sequence = row.in_elements = row.out_elements = kUnknown;
  row.dtype = row.group_size = -1;
  row.worker = worker ? 1 : 0;
  row.thread = thread_id();
  copy_text(row.name, sizeof(row.name), name);
  add_inputs(row, function);
  if (!worker) add_description(row);
  State& all = state();
  std::lock_guard<std::mutex> lock(all.guard);
  row.order = all.started++;
  return context;
}

void on_end(const at::RecordFunction&, at::ObserverContext* given) {
  if (given == nullptr) return;
  Row row = static_cast<Context*>(given)->row;
  row.end_ns = now_ns();
  State& all = state();
  std::lock_guard<std::mutex> lock(all.guard);
  if (all.rows.size() >= all.capacity) {
    ++all.dropped;
    return;
  }
  all.rows.push_back(row);
}

}  // namespace

extern "C" {

int64_t trine_observer_version() { return 1; }

int64_t trine_observer_row_bytes() { return static_cast<int64_t>(sizeof(Row)); }

int64_t trine_observer_now_ns() { return now_ns(); }

// Returns how many collectives began before, or -1.
int64_t trine_observer_enable(int64_t capacity) {
  State& all = state();
  try {
    std::lock_guard<std::mutex> lock(all.guard);
    if (!all.enabled) {
      all.capacity = static_cast<size_t>(capacity);
      all.rows.reserve(all.capacity);
      all.handle = at::addGlobalCallback(at::RecordFunctionCallback(&on_start, &on_end)
                                             .needsInputs(true)
                                             .scopes({at::RecordScope::USER_SCOPE}));
      all.enabled = true;
    }
    return all.started;
  } catch (...) {
    return -1;
  }
}

void trine_observer_disable() {
  State& all = state();
  try {
    std::lock_guard<std::mutex> lock(all.guard);
    if (all.enabled) at::removeCallback(all.handle);
    all.enabled = false;
  } catch (...) {
    all.enabled = false;
  }
}

// Moves the oldest rows, at most `capacity`, to `out`; returns how many.
int64_t trine_observer_drain(void* out, int64_t capacity) {
  State& all = state();
  std::lock_guard<std::mutex> lock(all.guard);
  const size_t count = std::min(all.rows.size(), static_cast<size_t>(capacity));
  std::memcpy(out, all.rows.data(), count * sizeof(Row));
  all.rows.erase(all.rows.begin(), all.rows.begin() + static_cast<std::ptrdiff_t>(count));
  return static_cast<int64_t>(count);
}

int64_t trine_observer_dropped() {
  State& all = state();
  std::lock_guard<std::mutex> lock(all.guard);
  return all.dropped;
}

int64_t trine_observer_started() {
  State& all = state();
  std::lock_guard<std::mutex> lock(all.guard);
  return all.started;
}

}  // extern "C"

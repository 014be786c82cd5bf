// A libnvidia-ml.so.1 for tests: the calls that the engine makes, over cards that a test describes and breaks.
//
// A device handle is a Device. fake_fail(function, card, code) makes one call, or with "*" every call, of a card
// return an NVML error code; code 0 heals it.
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TIMEOUT = 10 };
constexpr int kMaxCards = 16, kMaxParts = 7;

struct Device {
  int card, part;
};
struct Sample {
  unsigned long long looks;
};
struct EventSet {
  int card;
};
struct State {
  int cards = 0;
  int parts[kMaxCards];
  int gpm[kMaxCards];
  std::map<std::pair<std::string, int>, int> failures;
  std::map<int, std::vector<unsigned long long>> xids;
  std::vector<int> registered;
  unsigned long long looks = 0;
} state;
Device devices[kMaxCards][kMaxParts + 1];
EventSet event_sets[64];
int num_event_sets = 0;

int failure(const char *function, int card) {
  for (const char *name : {function, "*"})
    for (int whose : {card, -1}) {
      auto found = state.failures.find({name, whose});
      if (found != state.failures.end() && found->second) return found->second;
    }
  return SUCCESS;
}
}  // namespace

#define ASKED(device)                                              \
  do {                                                             \
    int code = failure(__func__, device ? (device)->card : -1);    \
    if (code) return code;                                         \
  } while (0)

extern "C" {
// --- what tests call -------------------------------------------------------------------------------------------------
void fake_reset(int cards) {
  state = State();
  state.cards = cards;
  num_event_sets = 0;
  for (int card = 0; card < kMaxCards; card++) {
    state.parts[card] = -1;
    state.gpm[card] = 0;
    for (int part = 0; part <= kMaxParts; part++) devices[card][part] = {card, part - 1};
  }
}
void fake_partition(int card, int parts) { state.parts[card] = parts; }
void fake_gpm(int card) { state.gpm[card] = 1; }
void fake_fail(const char *function, int card, int code) { state.failures[{function, card}] = code; }
void fake_xid(int card, unsigned long long code) {
  for (int whose : state.registered)
    if (whose == card) state.xids[card].push_back(code);
}

// --- the library -----------------------------------------------------------------------------------------------------
int nvmlInitWithFlags(unsigned) { return failure(__func__, -1); }
int nvmlShutdown() { return SUCCESS; }
const char *nvmlErrorString(int) { return "an error"; }
int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = state.cards;
  return failure(__func__, -1);
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **device) {
  if ((int)index >= state.cards) return INVALID_ARGUMENT;
  *device = &devices[index][0];
  ASKED(*device);
  return SUCCESS;
}
int nvmlDeviceGetUUID(Device *device, char *text, unsigned size) {
  ASKED(device);
  if (device->part < 0) snprintf(text, size, "GPU-%08x-0000-0000-0000-000000000000", 0xa0 + device->card);
  else snprintf(text, size, "MIG-%08x-0000-0000-0000-00000000000%d", 0xb0 + device->card, device->part);
  return SUCCESS;
}
int nvmlDeviceGetName(Device *device, char *text, unsigned size) {
  ASKED(device);
  snprintf(text, size, "NVIDIA H200");
  return SUCCESS;
}
int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
  ASKED(device);
  *current = *pending = state.parts[device->card] >= 0;
  return SUCCESS;
}
int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) {
  ASKED(device);
  *count = kMaxParts;
  return SUCCESS;
}
int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **part) {
  ASKED(device);
  if ((int)index >= state.parts[device->card]) return NOT_FOUND;
  *part = &devices[device->card][index + 1];
  return SUCCESS;
}
int nvmlDeviceGetGpuInstanceId(Device *device, unsigned *id) {
  ASKED(device);
  *id = 10 + device->part;
  return SUCCESS;
}
int nvmlDeviceGetComputeInstanceId(Device *device, unsigned *id) {
  ASKED(device);
  *id = 0;
  return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(Device *device, unsigned *rates) {
  ASKED(device);
  if (state.parts[device->card] >= 0) return NOT_SUPPORTED;
  rates[0] = 87;
  rates[1] = 42;
  return SUCCESS;
}
struct MemoryV1 {
  unsigned long long total, free, used;
};
struct MemoryV2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
int nvmlDeviceGetMemoryInfo(Device *device, MemoryV1 *memory) {
  ASKED(device);
  *memory = {1000, 300, 700};
  return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *memory) {
  ASKED(device);
  if (memory->version != 0x02000028) return 25;
  unsigned long long total = device->part < 0 ? 1000 : 100;
  *memory = {memory->version, total, total / 10, total / 2, total * 4 / 10};
  return SUCCESS;
}
int nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts) {
  ASKED(device);
  *milliwatts = 412500;
  return SUCCESS;
}
int nvmlDeviceGetTotalEnergyConsumption(Device *device, unsigned long long *millijoules) {
  ASKED(device);
  *millijoules = 1234567;
  return SUCCESS;
}
int nvmlDeviceGetTemperature(Device *device, int, unsigned *celsius) {
  ASKED(device);
  *celsius = 61;
  return SUCCESS;
}
int nvmlDeviceGetClockInfo(Device *device, int type, unsigned *megahertz) {
  ASKED(device);
  *megahertz = type == 1 ? 1980 : 3201;  // NVML_CLOCK_SM, else memory.
  return SUCCESS;
}
int nvmlDeviceGetPcieReplayCounter(Device *device, unsigned *count) {
  ASKED(device);
  *count = 5;
  return SUCCESS;
}
int nvmlDeviceGetTotalEccErrors(Device *device, int type, int counter, unsigned long long *count) {
  ASKED(device);
  if (counter != 0) return INVALID_ARGUMENT;  // Of this driver load.
  *count = type == 0 ? 30 : 2;                // Corrected, uncorrected.
  return SUCCESS;
}
int nvmlDeviceGetCurrentClocksEventReasons(Device *device, unsigned long long *reasons) {
  ASKED(device);
  *reasons = 0x01 | 0x04 | 0x40;  // Idle, power cap, hardware's thermal slowdown.
  return SUCCESS;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(Device *device, unsigned long long *reasons) {
  ASKED(device);
  *reasons = 0x80;
  return SUCCESS;
}

// --- events ----------------------------------------------------------------------------------------------------------
int nvmlDeviceGetSupportedEventTypes(Device *device, unsigned long long *types) {
  ASKED(device);
  *types = 0x8;
  return SUCCESS;
}
int nvmlEventSetCreate(EventSet **set) {
  *set = &event_sets[num_event_sets++ % 64];
  (*set)->card = -1;
  return SUCCESS;
}
int nvmlDeviceRegisterEvents(Device *device, unsigned long long types, EventSet *set) {
  ASKED(device);
  if (types != 0x8) return INVALID_ARGUMENT;
  set->card = device->card;
  state.registered.push_back(device->card);
  return SUCCESS;
}
struct EventData {
  Device *device;
  unsigned long long type, data;
  unsigned gpu_instance, compute_instance;
};
int nvmlEventSetWait_v2(EventSet *set, EventData *event, unsigned milliseconds) {
  if (milliseconds) return INVALID_ARGUMENT;  // Nobody may wait here.
  auto &waiting = state.xids[set->card];
  if (waiting.empty()) return TIMEOUT;
  *event = {&devices[set->card][0], 0x8, waiting.front(), ~0u, ~0u};
  waiting.erase(waiting.begin());
  return SUCCESS;
}

// --- GPU performance monitoring --------------------------------------------------------------------------------------
int nvmlGpmQueryDeviceSupport(Device *device, unsigned *support) {
  ASKED(device);
  support[1] = state.gpm[device->card];
  return SUCCESS;
}
int nvmlGpmSampleAlloc(Sample **sample) {
  *sample = new Sample();
  return SUCCESS;
}
int nvmlGpmSampleGet(Device *device, Sample *sample) {
  ASKED(device);
  if (state.parts[device->card] >= 0) return INVALID_ARGUMENT;
  sample->looks = ++state.looks;
  return SUCCESS;
}
int nvmlGpmMigSampleGet(Device *device, unsigned gpu_instance, Sample *sample) {
  ASKED(device);
  if (gpu_instance < 10) return INVALID_ARGUMENT;
  sample->looks = ++state.looks;
  return SUCCESS;
}
struct Metric {
  unsigned id;
  int code;
  double value;
  const char *names[3];
};
struct MetricsGet {
  unsigned version, count;
  Sample *first, *second;
  Metric metrics[1];
};
int nvmlGpmMetricsGet(MetricsGet *get) {
  if (get->version != 1 || get->count != 1 || get->metrics[0].id != 10) return INVALID_ARGUMENT;
  if (get->first->looks + 1 != get->second->looks) return INVALID_ARGUMENT;  // The last look and this one, in order.
  get->metrics[0].code = SUCCESS;
  get->metrics[0].value = 63.5;
  return SUCCESS;
}
}

// Work spread over threads: every chunk is done once, whoever helps; and callers that lose time to helpers whose cores are
// taken away ask for fewer of them, and for all of them again when that is over.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <set>
#include <vector>

#include "native_pool.h"
#include "threads.h"

using namespace quire;
using std::chrono::microseconds;
using std::chrono::milliseconds;

void expect(bool truth, const char* what) {
  if (truth) return;
  std::printf("%s\n", what);
  std::exit(1);
}

// A caller that has three helpers at most, by a clock of its own.
struct Caller {
  Company company;
  Clock::time_point now{std::chrono::hours(1)};
  int64_t asked = 3;

  // Jobs of 100 us for so long; each that has helpers waits for them.
  void work(milliseconds time, const std::function<microseconds(int64_t job)>& waits) {
    Clock::time_point end = now + time;
    for (int64_t job = 0; now < end; ++job) {
      Clock::time_point began = now;
      asked = company.of(3, began);
      Clock::time_point idle = began + microseconds(100);
      now = idle + (asked ? waits(job) : microseconds(0));
      if (asked) company.had(3, began, idle, now, microseconds(10));
    }
  }
};

void numbers() {
  auto never = [](int64_t) { return microseconds(5); };
  auto always = [](int64_t job) { return job % 10 ? microseconds(0) : milliseconds(3); };  // three quarters of the time
  auto seldom = [](int64_t job) { return job % 400 ? microseconds(0) : milliseconds(3); };  // a fourteenth
  Caller caller;
  caller.work(milliseconds(1000), never);
  expect(caller.asked == 3, "fewer helpers, and nobody waited");
  caller.work(milliseconds(10000), seldom);
  expect(caller.asked == 3, "fewer helpers for waits that cost less than they");
  // The third helper's core is taken: without it nobody waits.
  caller.work(milliseconds(3000), [&](int64_t job) { return caller.asked < 3 ? microseconds(0) : always(job); });
  expect(caller.asked >= 2, "more helpers were given up than were late");
  int64_t without = 0, jobs = 0;
  caller.work(milliseconds(3000), [&](int64_t job) {
    ++jobs, without += caller.asked == 2;
    return caller.asked < 3 ? microseconds(0) : always(job);
  });
  expect(without > jobs * 9 / 10, "a helper that is late is asked again too often");
  // All are taken.
  caller.work(milliseconds(3000), always);
  int64_t with = 0;
  caller.work(milliseconds(3000), [&](int64_t job) { return ++with, always(job); });
  expect(with < 2000, "helpers that are late are asked again too often");
  // All are back.
  caller.work(milliseconds(4000), never);
  expect(caller.asked == 3, "helpers that are back were not asked again");
}

void chunks() {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    Pool pool;
    int64_t count = 1 + random() % 40;
    std::vector<std::atomic<int64_t>> done(count);
    auto dawdle = [&, slow = random() % 40](int64_t chunk) {
      // Longer than a caller waits without going on with fewer, so that the later rounds have none, or one too late.
      if (chunk % 40 == static_cast<int64_t>(slow)) std::this_thread::sleep_for(milliseconds(3));
      done[chunk].fetch_add(1);
    };
    if (round % 2)
      parallel(pool, count, dawdle);
    else
      parallel(pool, count, [&](int64_t chunk, int64_t upcoming) { dawdle(chunk), expect(upcoming > chunk, "order"); });
    for (auto& times : done) expect(times.load() == 1, "a chunk was not done once");
  }
}

// A job that begins with fewer helpers: no others come to it, unless it is long.
void begins() {
  auto leave = [](int64_t helpers) {
    auto now = Clock::now();
    while (company.of(3, now) > helpers) company.had(3, now - milliseconds(20), now - milliseconds(19), now, {});
  };
  int64_t seen = 0;
  for (int64_t round = 0; round < 200; ++round) {
    Pool pool;
    Lock lock;
    std::set<std::thread::id> present;
    auto stay = [&](int64_t) {
      auto until = Clock::now() + microseconds(5);
      std::unique_lock<Lock> held(lock);
      present.insert(std::this_thread::get_id());
      held.unlock();
      while (Clock::now() < until) pause();
    };
    parallel(pool, 40, stay);  // whoever comes waits a moment for the next
    leave(round % 2);
    present.clear();
    auto began = Clock::now();
    parallel(pool, 40, stay);
    if (Clock::now() - began > milliseconds(1)) continue;  // this thread's own core was taken away
    expect(static_cast<int64_t>(present.size()) <= 1 + round % 2, "a short job had helpers who were not asked");
    ++seen;
  }
  std::printf("%ld short jobs\n", static_cast<long>(seen));
  leave(0);
  Pool pool;
  parallel(pool, 12, [](int64_t) { std::this_thread::sleep_for(milliseconds(1)); });
  expect(!pool.threads.empty(), "a long job did not ask for help");
}

int main() {
  numbers();
  chunks();
  begins();
  return 0;
}

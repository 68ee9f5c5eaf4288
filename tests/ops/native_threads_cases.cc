// Parallel loops: every chunk runs once, callers that wait for preempted helpers ask for fewer of them, and for all of
// them again later.
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

void expect(bool condition, const char* message) {
  if (condition) return;
  std::printf("%s\n", message);
  std::exit(1);
}

// A caller with at most three helpers and a simulated clock.
struct Caller {
  HelperLimit limit;
  Clock::time_point now{std::chrono::hours(1)};
  int64_t num_helpers = 3;

  // Run jobs of 100 us for some time; a job with helpers waits for them as long as `wait` says.
  void work(milliseconds time, const std::function<microseconds(int64_t job)>& wait) {
    Clock::time_point end = now + time;
    for (int64_t job = 0; now < end; ++job) {
      Clock::time_point start = now;
      num_helpers = limit.num_helpers(3, start);
      Clock::time_point idle_start = start + microseconds(100);
      now = idle_start + (num_helpers ? wait(job) : microseconds(0));
      if (num_helpers) limit.record_job(3, start, idle_start, now, microseconds(10));
    }
  }
};

void check_number_of_helpers() {
  auto never = [](int64_t) { return microseconds(5); };
  auto always = [](int64_t job) { return job % 10 ? microseconds(0) : milliseconds(3); };  // 3/4 of the time
  auto seldom = [](int64_t job) { return job % 400 ? microseconds(0) : milliseconds(3); };  // 1/14 of the time
  Caller caller;
  caller.work(milliseconds(1000), never);
  expect(caller.num_helpers == 3, "fewer helpers without any waits");
  caller.work(milliseconds(10000), seldom);
  expect(caller.num_helpers == 3, "fewer helpers although waits cost less than they save");
  // The third helper is preempted; without it there are no waits.
  caller.work(milliseconds(3000), [&](int64_t job) { return caller.num_helpers < 3 ? microseconds(0) : always(job); });
  expect(caller.num_helpers >= 2, "more helpers were dropped than were late");
  int64_t num_without = 0, num_jobs = 0;
  caller.work(milliseconds(3000), [&](int64_t job) {
    ++num_jobs, num_without += caller.num_helpers == 2;
    return caller.num_helpers < 3 ? microseconds(0) : always(job);
  });
  expect(num_without > num_jobs * 9 / 10, "a helper that is late is asked again too often");
  // All helpers are preempted.
  caller.work(milliseconds(3000), always);
  int64_t num_with_helpers = 0;
  caller.work(milliseconds(3000), [&](int64_t job) { return ++num_with_helpers, always(job); });
  expect(num_with_helpers < 2000, "helpers that are late are asked again too often");
  // All helpers are available again.
  caller.work(milliseconds(4000), never);
  expect(caller.num_helpers == 3, "helpers that are available again are not asked");
}

void check_every_chunk_runs_once() {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    Pool pool;
    int64_t count = 1 + random() % 40;
    std::vector<std::atomic<int64_t>> done(count);
    auto run_chunk = [&, slow = random() % 40](int64_t chunk) {
      // Longer than a caller waits before it asks for fewer helpers: later rounds have none, or a late one.
      if (chunk % 40 == static_cast<int64_t>(slow)) std::this_thread::sleep_for(milliseconds(3));
      done[chunk].fetch_add(1);
    };
    if (round % 2)
      parallel(pool, count, run_chunk);
    else
      parallel(pool, count, [&](int64_t chunk, int64_t upcoming) {
        run_chunk(chunk);
        expect(upcoming > chunk, "order");
      });
    for (auto& runs : done) expect(runs.load() == 1, "a chunk was not done once");
  }
}

// A job that begins with fewer helpers gets no more of them, unless it is long.
void check_helpers_of_short_and_long_jobs() {
  auto limit_helpers = [](int64_t helpers) {
    auto now = Clock::now();
    while (company.num_helpers(3, now) > helpers)
      company.record_job(3, now - milliseconds(20), now - milliseconds(19), now, {});
  };
  int64_t num_short_jobs = 0;
  for (int64_t round = 0; round < 200; ++round) {
    Pool pool;
    Lock lock;
    std::set<std::thread::id> threads;
    auto record_thread = [&](int64_t) {
      auto until = Clock::now() + microseconds(5);
      std::unique_lock<Lock> guard(lock);
      threads.insert(std::this_thread::get_id());
      guard.unlock();
      while (Clock::now() < until) pause();
    };
    parallel(pool, 40, record_thread);  // helpers wait a moment for the next job
    limit_helpers(round % 2);
    threads.clear();
    auto start = Clock::now();
    parallel(pool, 40, record_thread);
    if (Clock::now() - start > milliseconds(1)) continue;  // this thread was preempted
    expect(static_cast<int64_t>(threads.size()) <= 1 + round % 2, "a short job had helpers that were not asked");
    ++num_short_jobs;
  }
  std::printf("%ld short jobs\n", static_cast<long>(num_short_jobs));
  limit_helpers(0);
  Pool pool;
  parallel(pool, 12, [](int64_t) { std::this_thread::sleep_for(milliseconds(1)); });
  expect(!pool.threads.empty(), "a long job did not ask for help");
}

int main() {
  check_number_of_helpers();
  check_every_chunk_runs_once();
  check_helpers_of_short_and_long_jobs();
  return 0;
}

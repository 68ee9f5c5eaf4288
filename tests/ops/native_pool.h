// A pool that starts a thread for every task: the opposite of a pool whose threads are all busy.
#pragma once

#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

struct Pool {
  std::vector<std::thread> threads;
  int64_t num_threads() const { return 4; }
  void Schedule(std::function<void()> task) { threads.emplace_back(std::move(task)); }
  ~Pool() {
    for (std::thread& t : threads) t.join();
  }
};

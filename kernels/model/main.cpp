// The model checker's command line; ci/model.sh builds and runs it.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "litmus.h"
#include "scenario.h"

using namespace model;

namespace {

const char kUsage[] =
    "usage: model [--exhaustive] [--random N] [--seed S] [--seconds T] [--list] [--litmus] [--replay SCHEDULE] [SCENARIO...]\n"
    "  --exhaustive   all schedules of the scenarios that are small enough; without --random the only thing done\n"
    "  --random N     N random schedules of each scenario, but for those; 0: as many as the scenario asks for\n"
    "  --seed S       the first one's seed; the next ones count from there\n"
    "  --seconds T    the most that one scenario may take in each mode\n"
    "  --litmus       small programs of which it is known what weak memory may show: whether the model shows all of that and no more\n"
    "  --replay X     one schedule of one scenario again, with its trace\n";

void row(const Scenario& s, const char* mode, const Result& r) {
  printf("%-28s %-10s %10llu %10llu %12llu %8.2f  %s\n", s.name.c_str(), mode, (unsigned long long)r.states, (unsigned long long)r.runs,
         (unsigned long long)r.steps, r.seconds, r.failed ? "FAILED" : r.complete ? "ok" : "not complete");
  fflush(stdout);
}

bool report(const Scenario& s, const Setup& setup, const char* mode, const Result& r) {
  row(s, mode, r);
  if (!r.failed) return true;
  printf("\n%s: %s\n\nThe schedule, step by step:\n\n", s.name.c_str(), r.what.c_str());
  const Result again = replay(setup, r.schedule);
  printf("\n%s\n", again.failed ? again.what.c_str() : "(it did not fail again)");
  printf("again by: model %s --replay %s\n\n", s.name.c_str(), r.schedule.c_str());
  return false;
}

}  // namespace

int main(int count, char** arguments) {
  bool exhaustive = false, random = false;
  uint64_t runs = 0, seed = 1;
  double seconds = 1e9;
  const char* schedule = nullptr;
  std::vector<std::string> names;
  for (int i = 1; i < count; i++) {
    const std::string a = arguments[i];
    const auto value = [&] {
      if (++i == count) {
        fputs(kUsage, stderr);
        exit(2);
      }
      return arguments[i];
    };
    if (a == "--exhaustive") exhaustive = true;
    else if (a == "--random") random = true, runs = strtoull(value(), nullptr, 0);
    else if (a == "--seed") seed = strtoull(value(), nullptr, 0);
    else if (a == "--seconds") seconds = atof(value());
    else if (a == "--replay") schedule = value();
    else if (a == "--litmus") return run_litmus() ? 0 : 1;
    else if (a == "--list") {
      for (const Scenario& s : scenarios()) printf("%s\n", s.name.c_str());
      return 0;
    } else if (a[0] == '-') {
      fputs(kUsage, stderr);
      return 2;
    } else names.push_back(a);
  }
  if (!exhaustive && !random) exhaustive = true;

  const std::vector<Scenario> all = scenarios();
  std::vector<const Scenario*> chosen;
  for (const Scenario& s : all) {
    bool take = names.empty();
    for (const std::string& n : names) take |= n == s.name;
    if (take) chosen.push_back(&s);
  }
  if (chosen.empty() || (schedule != nullptr && chosen.size() != 1)) {
    fputs("no such scenario\n", stderr);
    return 2;
  }
  if (schedule != nullptr) {
    const Setup setup = prepare(*chosen[0]);
    const Result r = replay(setup, schedule);
    printf("\n%s\n", r.failed ? r.what.c_str() : "it ends without a failure");
    return r.failed;
  }
  printf("%-28s %-10s %10s %10s %12s %8s  %s\n", "scenario", "mode", "states", "schedules", "steps", "seconds", "result");
  bool good = true;
  for (const Scenario* s : chosen) {
    if (exhaustive && s->exhaustive) {
      const Setup setup = prepare(*s);
      const Result r = explore(setup, seconds);
      good &= report(*s, setup, "all", r) && r.complete;
    } else if (random) {
      const Setup setup = prepare(*s);
      good &= report(*s, setup, "random", explore_at_random(setup, runs != 0 ? runs : s->runs, seed, seconds));
    }
  }
  return good ? 0 : 1;
}

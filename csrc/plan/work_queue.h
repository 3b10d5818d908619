// The order in which CTAs fetch work items: one record of the plan, a forward tile or a backward
// work unit, for one head.
#pragma once

#include "params.h"
#include "plan/portable.h"

namespace ringfa3 {

constexpr int kWorkDepth = 4;  // work items decoded at once: the one that ends, the next, and room
constexpr int kBlocksAhead = 4;  // the next item is fetched with this many blocks left to load

struct WorkIndex {
  int record, head;
};

// Work item w of `records` x `heads`. Heads run in sections of `head_section`, whose tensors share
// the L2 cache. Inside a section all heads of a record run concurrently, records in the plan's
// order.
RINGFA3_DEVICE WorkIndex decode_work(int w, int records, int heads, int head_section) {
  int const per_section = records * head_section;
  int const section = w / per_section;
  int const rest = w - section * per_section;
  int const width = min(head_section, heads - section * head_section);
  return {rest / width, section * head_section + rest % width};
}

}  // namespace ringfa3

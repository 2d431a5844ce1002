// The reverse index against a plain host construction: same lists in the same order, items that cut
// them exactly, block rows, key rows, turns; and the same bits when built twice.
#include "harness.h"

#include "cuda/index/index.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <set>
#include <tuple>

namespace thresher::test {
namespace {

using cuda::BlockIndex;
using cuda::BlockRow;
using cuda::IndexOptions;
using cuda::WorkItem;

enum class Ids { kSelection, kJunk, kHot, kNone };

struct Case {
  const char* name;
  Batch batch;
  int heads = 2, top_k = 16, block_size = 64;
  int window = 256, max_entries = 64;
  Ids ids = Ids::kSelection;
  bool ordered = false;
  int kv_heads = 1, proxy_kv_heads = 1;
};

std::vector<int32_t> make_ids(const Case& c, const std::vector<Batch::Token>& tokens) {
  std::mt19937 random(7);
  std::vector<int32_t> ids(static_cast<size_t>(c.heads) * tokens.size() * c.top_k, -1);
  for (int head = 0; head < c.heads; ++head)
    for (size_t t = 0; t < tokens.size(); ++t) {
      int32_t* row = ids.data() + (head * tokens.size() + t) * c.top_k;
      const int visible =
          tokens[t].position < 0 ? 0 : static_cast<int>(tokens[t].position / c.block_size + 1);
      if (c.ids == Ids::kJunk) {
        for (int k = 0; k < c.top_k; ++k)
          row[k] = static_cast<int32_t>(random() % (visible + 7)) - 3;
      } else if (c.ids == Ids::kHot && visible) {
        row[0] = 0;
        if (visible > 1 && c.top_k > 1)
          row[1] = visible - 1;
      } else if (c.ids == Ids::kSelection && visible) {
        std::set<int32_t> chosen = {visible - 1};
        while (static_cast<int>(chosen.size()) < std::min(visible, c.top_k))
          chosen.insert(static_cast<int32_t>(random() % visible));
        std::copy(chosen.begin(), chosen.end(), row);
      }
    }
  return ids;
}

// (window, head, first key row of the block) -> entries (offset, number) in order.
using Lists = std::map<std::tuple<int, int, int64_t>, std::vector<std::pair<int, int>>>;

int sharing(int heads, int owners) {
  return heads % owners == 0 ? heads / owners : owners % heads == 0 ? 1 : heads;
}

void check_case(const Case& c) {
  SCOPED_TRACE(c.name);
  const auto tokens = c.batch.describe();
  const auto ids = make_ids(c, tokens);
  const int64_t count = c.batch.tokens;

  // --- expected ---
  Lists expected;
  std::vector<int> slot_count(static_cast<size_t>(c.heads * count), 0);
  for (int head = 0; head < c.heads; ++head)
    for (int64_t t = 0; t < count; ++t) {
      const int32_t* row = ids.data() + (head * count + t) * c.top_k;
      const Batch::Token& token = tokens[static_cast<size_t>(t)];
      std::set<int32_t> seen;
      for (int k = 0; k < c.top_k; ++k) {
        if (row[k] < 0 || token.position < 0 || row[k] > token.position / c.block_size ||
            !seen.insert(row[k]).second)
          continue;
        expected[{static_cast<int>(t / c.window), head,
                  token.first_key + int64_t{row[k]} * c.block_size}]
            .emplace_back(t % c.window, slot_count[static_cast<size_t>(head * count + t)]++);
      }
    }
  std::map<int64_t, int64_t> documents; // first key -> length
  for (int64_t f = 0; f < c.batch.fragments(); ++f)
    if (c.batch.visible_keys(f) > 0) {
      int64_t& length = documents[c.batch.first_key(f)];
      length = std::max(length, c.batch.visible_keys(f));
    }

  // --- built ---
  Problem problem;
  Shapes shapes;
  const DeviceBatch device_batch(c.batch);
  device_batch.describe(problem, shapes);
  shapes.proxy_heads = c.heads;
  shapes.kv_heads = c.kv_heads;
  shapes.proxy_kv_heads = c.proxy_kv_heads;
  shapes.top_k = c.top_k;
  shapes.block_size = c.block_size;
  IndexOptions options;
  options.window_tokens = c.window;
  options.max_entries = c.max_entries;
  options.ordered = c.ordered;
  const DeviceArray<int32_t> device_ids(ids);
  const Tensor ids_tensor = tensor_of(device_ids, c.heads, count, c.top_k);

  cuda::WorkspaceCarver measure;
  cuda::carve_index(problem, shapes, options, measure);
  std::vector<char> images[2];
  BlockIndex index;
  DeviceArray<char> workspace(static_cast<int64_t>(measure.bytes()));
  const auto host = [&](const auto* from, int64_t n) { // of the last build
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(from)>>;
    std::vector<T> values(static_cast<size_t>(n));
    CUDA_CHECK(cudaMemcpy(values.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  };
  for (auto& image : images) {
    workspace.poison();
    cuda::WorkspaceCarver carver(workspace.data());
    index = cuda::carve_index(problem, shapes, options, carver);
    cuda::build_index(index, problem, shapes, ids_tensor, nullptr);
    CUDA_CHECK(cudaDeviceSynchronize());
    image = workspace.download();
  }
  ASSERT_TRUE(workspace.guards_intact());
  // Look-back words may differ in kind (own or all items), nothing else may.
  const size_t skip = reinterpret_cast<char*>(index.scratch.segment_state) - workspace.data();
  const size_t skip_bytes = sizeof(uint32_t) * index.windows * c.heads;
  std::memset(images[0].data() + skip, 0, skip_bytes);
  std::memset(images[1].data() + skip, 0, skip_bytes);
  ASSERT_EQ(std::memcmp(images[0].data(), images[1].data(), images[0].size()), 0)
      << "two builds differ";

  const auto position = host(index.position, count);
  const auto slots = host(index.slot_count, c.heads * count);
  for (int64_t t = 0; t < count; ++t)
    ASSERT_EQ(position[t], tokens[t].position) << "token " << t;
  for (int64_t i = 0; i < c.heads * count; ++i)
    ASSERT_EQ(slots[i], slot_count[i]) << "head " << i / count << " token " << i % count;

  // Block rows and key rows.
  const auto block_rows = host(index.block_rows, index.rows);
  std::map<int64_t, int> row_of_block; // first key row -> block row
  for (int row = 0; row < index.rows; ++row)
    if (block_rows[row].key_count > 0)
      ASSERT_TRUE(row_of_block.emplace(block_rows[row].key_begin, row).second);
  size_t blocks = 0;
  std::vector<int> key_row(static_cast<size_t>(c.batch.keys), 0);
  for (const auto& [first_key, length] : documents)
    for (int64_t begin = 0; begin < length; begin += c.block_size, ++blocks) {
      ASSERT_TRUE(row_of_block.count(first_key + begin)) << first_key << "+" << begin;
      const int row = row_of_block[first_key + begin];
      const int keys = static_cast<int>(std::min<int64_t>(c.block_size, length - begin));
      ASSERT_EQ(block_rows[row].key_count, keys);
      ASSERT_EQ(block_rows[row].block_begin, begin);
      for (int key = 0; key < keys; ++key)
        key_row[static_cast<size_t>(first_key + begin + key)] = row + 1;
    }
  ASSERT_EQ(blocks, row_of_block.size());
  ASSERT_EQ(host(index.key_row, c.batch.keys), key_row);

  // Items cut the lists, segment by segment.
  const int segments = index.windows * c.heads;
  const auto segment_items = host(index.segment_items, segments + 1);
  const int items_total = segment_items[segments];
  ASSERT_EQ(segment_items[0], 0);
  ASSERT_LE(items_total, index.max_items);
  const auto items = host(index.items, items_total);
  const auto entries = host(index.entries, int64_t{segments} * c.window * c.top_k);
  std::vector<int> row_items(static_cast<size_t>(c.heads) * index.rows, 0);
  std::map<std::tuple<int, int, int64_t>, std::map<unsigned, int>> pieces; // entry_begin -> item
  for (int segment = 0; segment < segments; ++segment)
    for (int i = segment_items[segment]; i < segment_items[segment + 1]; ++i) {
      const WorkItem& item = items[i];
      ASSERT_EQ(item.window * c.heads + item.proxy_head, segment);
      ASSERT_GE(item.entry_count, 1);
      ASSERT_LE(item.entry_count, index.max_entries);
      const BlockRow& row = block_rows[item.row];
      ASSERT_EQ(item.key_begin, row.key_begin);
      ASSERT_EQ(item.key_count, row.key_count);
      ASSERT_EQ(item.block_begin, row.block_begin);
      ASSERT_TRUE((pieces[{item.window, item.proxy_head, item.key_begin}]
                       .emplace(item.entry_begin, i)
                       .second));
      ++row_items[static_cast<size_t>(item.proxy_head) * index.rows + item.row];
    }
  ASSERT_EQ(pieces.size(), expected.size());
  for (const auto& [key, list] : expected) {
    const auto found = pieces.find(key);
    ASSERT_NE(found, pieces.end());
    size_t at = 0;
    unsigned next = found->second.begin()->first;
    const auto& [window, head, first_key] = key;
    const int64_t base = (int64_t{window} * c.heads + head) * c.window * c.top_k;
    for (const auto& [begin, i] : found->second) {
      ASSERT_EQ(begin, next); // pieces follow each other
      next = begin + items[i].entry_count;
      for (int e = 0; e < items[i].entry_count; ++e, ++at) {
        ASSERT_LT(at, list.size());
        const uint32_t entry = entries[static_cast<size_t>(base + begin + e)];
        ASSERT_EQ(entry & ((1u << cuda::kEntryTokenBits) - 1), unsigned(list[at].first));
        ASSERT_EQ(entry >> cuda::kEntryTokenBits, unsigned(list[at].second));
      }
    }
    ASSERT_EQ(at, list.size());
  }
  ASSERT_EQ(host(index.row_items, c.heads * int64_t{index.rows}), row_items);

  if (!c.ordered)
    return;
  const auto order = host(index.order, items_total);
  std::map<std::pair<int, int>, int> turns[2];
  for (int i = 0; i < items_total; ++i) {
    const int groups[2] = {sharing(c.heads, c.kv_heads), sharing(c.heads, c.proxy_kv_heads)};
    ASSERT_EQ(order[i].x, (turns[0][{items[i].proxy_head / groups[0], items[i].row}]++)) << i;
    ASSERT_EQ(order[i].y, (turns[1][{items[i].proxy_head / groups[1], items[i].row}]++)) << i;
  }
}

const std::vector<int64_t> kOddLengths = {5, 0, 0, 129, 1, 128, 127, 0, 700, 64, 63, 65, 2, 0};

TEST(Index, OddDocuments) {
  for (Ids ids : {Ids::kSelection, Ids::kJunk, Ids::kHot, Ids::kNone})
    for (int block_size : {32, 64, 128, 256})
      check_case({"odd", packed(kOddLengths, 13), 3, 5, block_size, 200, 64, ids});
}

TEST(Index, EveryTopK) {
  for (int top_k : {1, 2, 3, 8, 15, 16, 17, 32, 33, 64, 100, 128})
    for (Ids ids : {Ids::kSelection, Ids::kJunk})
      check_case({"top_k", packed({900, 3, 2100}, 5), 2, top_k, 32, 512, 128, ids});
}

TEST(Index, WindowsAndPieces) {
  for (int window : {1, 63, 64, 100, 1024, 4096, 100000})
    for (int max_entries : {1, 64, 300, 100000})
      check_case({"windows", packed({1500, 40, 700}), 2, 16, 64, window, max_entries, Ids::kHot});
}

TEST(Index, EqualRows) {
  check_case({"rows", rows(3, 300), 2, 4, 64, 128, 64});
  check_case({"one row", rows(1, 5000), 1, 16, 128, 2048, 1024});
}

TEST(Index, FragmentsWithSharedKeys) {
  for (int rank : {0, 1, 2})
    for (Ids ids : {Ids::kSelection, Ids::kJunk})
      check_case({"context parallel", context_parallel({1000, 64, 0, 333, 2000, 7}, 3, rank), 4, 8,
                  64, 300, 64, ids});
}

TEST(Index, QueriesWithoutKeys) {
  Batch few_keys;
  few_keys.q_begin = {0, 76, 110, 256};
  few_keys.k_begin = {0, 1, 2};
  few_keys.k_len = {1, 1, 1};
  few_keys.tokens = 256;
  few_keys.keys = 3;
  check_case({"one key each", few_keys, 2, 4, 64, 64, 64, Ids::kJunk});
  Batch uneven;
  uneven.q_begin = {0, 0, 1208, 2048, 2048};
  uneven.k_begin = {0, 2538, 4280, 5120};
  uneven.k_len = {2538, 1742, 840, 3072};
  uneven.tokens = 2048;
  uneven.keys = 8192;
  check_case({"documents without queries", uneven, 2, 8, 128, 512, 128});
}

TEST(Index, Turns) {
  for (auto [kv_heads, proxy_kv_heads] : {std::pair{1, 1}, {2, 1}, {4, 4}, {8, 2}, {6, 4}}) {
    Case c = {"turns", packed({1500, 40, 700}), 4, 8, 64, 300, 64, Ids::kHot, true};
    c.kv_heads = kv_heads;
    c.proxy_kv_heads = proxy_kv_heads;
    check_case(c);
  }
}

TEST(Index, ManyShortDocumentsBesideALongOne) {
  std::vector<int64_t> lengths(10000, 7);
  lengths.insert(lengths.begin() + 3000, 40000);
  check_case({"short and long", packed(lengths), 1, 16, 128, 4096, 512});
}

TEST(Index, MoreRowsThanFitInSharedMemory) {
  check_case({"rows in passes", packed({300000}), 1, 16, 32, 8192, 512});
  check_case({"rows in passes, all hot", packed({200000, 100}), 1, 2, 32, 65536, 2048, Ids::kHot});
}

} // namespace
} // namespace thresher::test

// A lane of messages with fewer entries than messages, in every interleaving: sender, receiver and the helpers of both.
#include <array>
#include <memory>

#include <gtest/gtest.h>

#include "support/explore.h"

namespace hyper_parallel::testing {
namespace {

using Byte = std::uint8_t;

constexpr Byte kSlots = 1, kMessages = 3;
enum Entry : Byte { kFree, kPosted, kClaimed, kDone };
enum Thread : std::size_t { kSender, kSenderHelper, kReceiver, kReceiverHelper, kThreads };
enum Bell : std::size_t { kSenderBell, kSenderHelperBell, kReceiverBell, kReceiverHelperBell, kBells };

struct Lane {
  std::array<Byte, kThreads> pc = {};
  // Shared by the two ranks.
  Byte entry = kFree, message = 0, tail = 0, backlog = 0;
  std::array<Byte, kBells> rung = {};  ///< since somebody looked: all that a count tells
  // Of the sender; its thread and helper exclude each other.
  Byte sender_lock = 0, queue = 0, announced = 0, completed = 0;
  // Of the receiver, likewise. Messages by bit.
  Byte receiver_lock = 0, head = 0, asked = 0, arrived = 0, moved = 0, received = 0, moving = 0, finished_something = 0;
  Byte now = 0, saw_backlog = 0;
  Byte wrong = 0;
};

Byte bit(int message) { return static_cast<Byte>(1U << message); }
constexpr Byte kAll = (1U << kMessages) - 1;

enum class Fault {
  kNone,
  kNoRoomMade,          ///< messages that nobody asked for keep their entries
  kNoUrging,            ///< a waiting sender does not wake the receiver's helper
  kBacklogReadTooSoon,  ///< the receiver looks for a queue before it gives the entry back
  kBacklogSetTooLate,   ///< the sender looks for a free entry before it says that it has a queue
  kReusedTooSoon,       ///< the sender takes a claimed entry back
  kBellReadTooLate,     ///< after looking for work
};

/// What the two threads of the program do.
enum class Scene {
  kWaitAtOnce,        ///< both wait for every message, the receiver in another order than they were sent
  kReceiverComputes,  ///< all receives are posted, then the receiver does nothing until the sender has sent everything
  kSenderComputes,    ///< the sender posts and does nothing until the receiver has everything
};

class LaneModel {
 public:
  LaneModel(Scene scene, Fault fault) : scene_(scene), fault_(fault) {}

  Verdict check() const {
    const auto violation = [](const Lane& s) { return s.wrong != 0 ? "an entry was used again while it was read" : ""; };
    return explore<Lane>({}, {sender(), sender_helper(), receiver(), receiver_helper()}, violation,
                         [](std::size_t thread) { return thread == kSenderHelper || thread == kReceiverHelper; });
  }

 private:
  using Code = Program<Lane>;
  using Run = std::function<void(Lane&)>;
  using When = std::function<bool(const Lane&)>;

  static void add(Code& code, std::string name, Run run, When when = {}) {
    code.push_back({std::move(name), std::move(when), std::move(run)});
  }
  /// A step that needs no turn of others before it: see Step::local.
  static void add_local(Code& code, std::string name, Run run) {
    code.push_back({std::move(name), {}, std::move(run), /*local=*/true});
  }
  static void ring(Code& code, Bell bell) {
    add(code, "ring", [=](Lane& s) { s.rung[bell] = 1; });
  }
  static Byte place(const Code& code) { return static_cast<Byte>(code.size()); }
  /// Adds a step that jumps to what is set as its target later. The condition may read what its rank alone changes, under the
  /// lock.
  static void jump_if(Code& code, Thread thread, std::shared_ptr<Byte> target, When when) {
    look_and_jump(code, thread, std::move(target), std::move(when));
    code.back().local = true;
  }
  /// The same on a condition that others may change.
  static void look_and_jump(Code& code, Thread thread, std::shared_ptr<Byte> target, When when) {
    add(code, "jump", [=](Lane& s) {
      if (when(s)) s.pc[thread] = *target;
    });
  }

  void lock(Code& code, Byte Lane::*which) const {
    add(
        code, "lock", [=](Lane& s) { s.*which = 1; }, [=](const Lane& s) { return s.*which == 0; });
  }
  static void unlock(Code& code, Byte Lane::*which) {
    add(code, "unlock", [=](Lane& s) { s.*which = 0; });
  }
  static void look_at_bell(Code& code, Bell bell) {
    add(code, "look at bell", [=](Lane& s) { s.rung[bell] = 0; });
  }
  static void sleep(Code& code, Bell bell) {
    add(
        code, "sleep", [](Lane&) {}, [=](const Lane& s) { return s.rung[bell] != 0; });
  }

  /// Takes done entries back.
  void collect(Code& code) const {
    const bool too_soon = fault_ == Fault::kReusedTooSoon;
    add(code, "collect", [=](Lane& s) {
      if (s.entry != kDone && !(too_soon && s.entry == kClaimed)) return;
      s.entry = kFree;
      s.completed = s.announced;
    });
  }
  /// Announces the next message of the queue if there is room.
  void announce(Code& code, Thread thread) const {
    const auto end = std::make_shared<Byte>();
    jump_if(code, thread, end, [](const Lane& s) { return s.queue == 0 || s.entry != kFree; });
    add_local(code, "fill entry", [](Lane& s) {
      s.message = s.announced++;
      s.entry = kPosted;
      --s.queue;
    });
    add(code, "tail", [](Lane& s) { ++s.tail; });
    ring(code, kReceiverBell);
    *end = place(code);
  }
  /// Outbox::advance.
  void advance_sender(Code& code, Thread thread) const {
    const auto end = std::make_shared<Byte>();
    collect(code);
    announce(code, thread);
    jump_if(code, thread, end, [](const Lane& s) { return s.queue != 0; });
    add(code, "no backlog", [](Lane& s) { s.backlog = 0; });
    *end = place(code);
  }

  Code sender() const {
    Code code;
    for (int i = 0; i < kMessages; ++i) {
      lock(code, &Lane::sender_lock);
      collect(code);
      add_local(code, "post", [](Lane& s) { ++s.queue; });
      announce(code, kSender);
      if (fault_ == Fault::kBacklogSetTooLate) advance_sender(code, kSender);
      const auto end = std::make_shared<Byte>();
      jump_if(code, kSender, end, [](const Lane& s) { return s.queue == 0; });
      add(code, "backlog", [](Lane& s) { s.backlog = 1; });
      if (fault_ != Fault::kBacklogSetTooLate) advance_sender(code, kSender);
      *end = place(code);
      unlock(code, &Lane::sender_lock);
    }
    if (scene_ == Scene::kSenderComputes) {
      add(
          code, "compute", [](Lane&) {}, [](const Lane& s) { return s.received == kAll; });
      return code;
    }
    const auto again = std::make_shared<Byte>(place(code));
    const auto end = std::make_shared<Byte>();
    if (fault_ != Fault::kBellReadTooLate) look_at_bell(code, kSenderBell);
    lock(code, &Lane::sender_lock);
    advance_sender(code, kSender);
    unlock(code, &Lane::sender_lock);
    look_and_jump(code, kSender, end, [](const Lane& s) { return s.completed == kMessages; });
    if (fault_ == Fault::kBellReadTooLate) look_at_bell(code, kSenderBell);
    if (fault_ != Fault::kNoUrging) ring(code, kReceiverHelperBell);
    sleep(code, kSenderBell);
    jump_if(code, kSender, again, [](const Lane&) { return true; });
    *end = place(code);
    return code;
  }

  Code sender_helper() const {
    Code code;
    const auto again = std::make_shared<Byte>(Byte{0});
    look_at_bell(code, kSenderHelperBell);
    lock(code, &Lane::sender_lock);
    advance_sender(code, kSenderHelper);
    unlock(code, &Lane::sender_lock);
    sleep(code, kSenderHelperBell);
    jump_if(code, kSenderHelper, again, [](const Lane&) { return true; });
    return code;
  }

  /// Copies the message in the entry, which is `now`, and gives the entry back.
  void fetch(Code& code) const {
    add(code, "claim", [](Lane& s) { s.entry = kClaimed; });
    add(code, "copy", [](Lane& s) { s.wrong |= static_cast<Byte>(s.message != s.now || s.entry != kClaimed); });
    const auto look = [](Lane& s) { s.saw_backlog = s.backlog; };
    if (fault_ == Fault::kBacklogReadTooSoon) add(code, "backlog?", look);
    add(code, "done", [](Lane& s) {
      s.wrong |= static_cast<Byte>(s.message != s.now);
      s.entry = kDone;
    });
    ring(code, kSenderBell);
    if (fault_ != Fault::kBacklogReadTooSoon) add(code, "backlog?", look);
    add(code, "wake helper", [](Lane& s) {
      if (s.saw_backlog != 0) s.rung[kSenderHelperBell] = 1;
      s.saw_backlog = 0;
    });
  }

  /// Inbox::advance: reads announcements, fetches what was asked for, makes room.
  void advance_receiver(Code& code, Thread thread) const {
    const auto again = std::make_shared<Byte>(place(code));
    const auto read_all = std::make_shared<Byte>(), not_asked = std::make_shared<Byte>(), end = std::make_shared<Byte>();
    look_and_jump(code, thread, read_all, [](const Lane& s) { return s.head == s.tail; });
    add_local(code, "match", [](Lane& s) { s.now = s.head++; });
    jump_if(code, thread, not_asked, [](const Lane& s) { return (s.asked & bit(s.now)) == 0; });
    fetch(code);
    add(code, "received", [thread](Lane& s) {
      s.received |= bit(s.now);
      if (thread == kReceiverHelper) s.finished_something = 1;
      s.now = 0;
    });
    jump_if(code, thread, again, [](const Lane&) { return true; });
    *not_asked = place(code);
    add_local(code, "remember", [](Lane& s) { s.arrived |= bit(s.now), s.now = 0; });
    jump_if(code, thread, again, [](const Lane&) { return true; });
    *read_all = place(code);
    if (fault_ == Fault::kNoRoomMade) return;
    // One entry: it is full if the last one that was read is neither fetched nor moved.
    jump_if(code, thread, end, [](const Lane& s) { return s.arrived == 0 || (s.asked & ~s.received) == 0; });
    add_local(code, "move", [](Lane& s) {
      for (int m = 0; m < kMessages; ++m) {
        if ((s.arrived & bit(m)) != 0) s.now = static_cast<Byte>(m);
      }
    });
    fetch(code);
    add_local(code, "moved", [](Lane& s) { s.moved |= s.arrived, s.arrived = 0, s.now = 0; });
    *end = place(code);
  }

  /// Inbox::post.
  void ask(Code& code, int message) const {
    const auto elsewhere = std::make_shared<Byte>(), end = std::make_shared<Byte>();
    lock(code, &Lane::receiver_lock);
    advance_receiver(code, kReceiver);
    jump_if(code, kReceiver, elsewhere, [=](const Lane& s) { return (s.arrived & bit(message)) == 0; });
    add_local(code, "take", [=](Lane& s) { s.now = static_cast<Byte>(message), s.arrived &= static_cast<Byte>(~bit(message)); });
    fetch(code);
    add(code, "received", [=](Lane& s) { s.received |= bit(message), s.asked |= bit(message), s.now = 0; });
    jump_if(code, kReceiver, end, [](const Lane&) { return true; });
    *elsewhere = place(code);
    add(code, "ask", [=](Lane& s) {
      s.asked |= bit(message);
      if ((s.moved & bit(message)) != 0) s.received |= bit(message);
    });
    *end = place(code);
    unlock(code, &Lane::receiver_lock);
  }

  void wait_for(Code& code, int message) const {
    const auto again = std::make_shared<Byte>(place(code));
    const auto end = std::make_shared<Byte>();
    look_at_bell(code, kReceiverBell);
    lock(code, &Lane::receiver_lock);
    advance_receiver(code, kReceiver);
    unlock(code, &Lane::receiver_lock);
    look_and_jump(code, kReceiver, end, [=](const Lane& s) { return (s.received & bit(message)) != 0; });
    sleep(code, kReceiverBell);
    jump_if(code, kReceiver, again, [](const Lane&) { return true; });
    *end = place(code);
  }

  Code receiver() const {
    Code code;
    const std::array<int, kMessages> order = {2, 0, 1};
    if (scene_ == Scene::kReceiverComputes) {
      for (const int message : order) ask(code, message);
      add(
          code, "compute", [](Lane&) {}, [](const Lane& s) { return s.completed == kMessages; });
    }
    for (const int message : order) {
      if (scene_ != Scene::kReceiverComputes) ask(code, message);
      wait_for(code, message);
    }
    return code;
  }

  Code receiver_helper() const {
    Code code;
    const auto again = std::make_shared<Byte>(Byte{0});
    look_at_bell(code, kReceiverHelperBell);
    lock(code, &Lane::receiver_lock);
    advance_receiver(code, kReceiverHelper);
    unlock(code, &Lane::receiver_lock);
    add(code, "tell", [](Lane& s) {
      if (s.finished_something != 0) s.rung[kReceiverBell] = 1;
      s.finished_something = 0;
    });
    sleep(code, kReceiverHelperBell);
    jump_if(code, kReceiverHelper, again, [](const Lane&) { return true; });
    return code;
  }

  Scene scene_;
  Fault fault_;
};

constexpr std::array kScenes = {Scene::kWaitAtOnce, Scene::kReceiverComputes, Scene::kSenderComputes};

TEST(LaneModel, EveryMessageArrivesInEveryInterleaving) {
  for (const Scene scene : kScenes) {
    const Verdict verdict = LaneModel(scene, Fault::kNone).check();
    EXPECT_EQ(verdict.problem, "") << static_cast<int>(scene);
    EXPECT_GT(verdict.states, 500) << static_cast<int>(scene);
  }
}

TEST(LaneModel, EveryMutationIsFound) {
  for (const Fault fault : {Fault::kNoRoomMade, Fault::kNoUrging, Fault::kBacklogReadTooSoon, Fault::kBacklogSetTooLate,
                            Fault::kReusedTooSoon, Fault::kBellReadTooLate}) {
    bool found = false;
    for (const Scene scene : kScenes) found = found || !LaneModel(scene, fault).check().problem.empty();
    EXPECT_TRUE(found) << static_cast<int>(fault);
  }
}

}  // namespace
}  // namespace hyper_parallel::testing

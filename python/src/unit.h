#pragma once
// A unit as Python's front end holds it: the engine's handle, the modules' places for its parameters, and its open forwards.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/function.h>

#include <hyper_parallel/fsdp/unit.h>

#include "object.h"

namespace hyper_parallel::python {

/// A parameter's torch DTensor: has requires_grad and .grad of its own, and the engine's shard as its local tensor.
class DTensorLeaf : public fsdp::ParameterLeaf {
 public:
  /// \param parameter a torch DTensor with local tensor `sharded`
  DTensorLeaf(py::object parameter, const at::Tensor& sharded);
  [[nodiscard]] bool requires_grad() const override { return tensor().requires_grad(); }
  [[nodiscard]] at::Tensor grad() const override;
  void set_grad(const at::Tensor& part) override;
  void grad_arrived() override;
  [[nodiscard]] std::uint64_t version() const override;

  [[nodiscard]] PyObject* parameter() const { return parameter_.get(); }
  void replace(py::object parameter) { parameter_ = Ref(std::move(parameter)); }
  /// Whether `entry`, which a module has registered, is the parameter with the engine's shard in it. Needs the lock.
  [[nodiscard]] bool is_registered_as(PyObject* entry) const;

 private:
  // By its Python object: torch.utils.swap_tensors may give it another tensor.
  [[nodiscard]] const at::Tensor& tensor() const;
  Ref parameter_, local_;
};

/// What a module computes with where tensor parallelism has cut a parameter before: a DTensor over the gathered block. Its
/// gradient goes on to that, as a plain tensor.
class GatheredBlock {
 public:
  /// \param wrap plain tensor -> DTensor over it
  GatheredBlock(at::Tensor block, py::object wrap) : block_(std::move(block)), wrap_(std::move(wrap)) {}
  /// The DTensor, which leads backwards to the block if that has a gradient. Needs the lock.
  [[nodiscard]] PyObject* current();

 private:
  void make();
  at::Tensor block_;
  Ref wrap_, whole_;
  c10::intrusive_ptr<torch::autograd::Node> node_;
};

/// One parameter and the places where modules register it.
struct Slot {
  std::shared_ptr<DTensorLeaf> leaf;  ///< null: the program sees the sharded tensor itself
  Ref sharded, gathered;
  std::unique_ptr<GatheredBlock> block = {};     ///< replaces `gathered` where it was a DTensor before
  std::vector<std::pair<Ref, Ref>> places = {};  ///< dictionary and key
};

/// What make_unit is given for one parameter.
struct SlotDescription {
  std::string name;
  at::Tensor parameter;
  int member = 0;
  std::optional<std::int64_t> shard_dim = {};
  py::list places;
  py::object wrap_block;  ///< see GatheredBlock; None for plain parameters
};

/// Thread safety: that of UnitHandle; everything needs the interpreter lock, and lets go of it while it waits.
class PyUnit : public std::enable_shared_from_this<PyUnit> {
 public:
  /// \param wrap (slot, sharded tensor) -> DTensor to register, or None to register the sharded tensor itself
  /// \param adopt (unit, slot, entry or None): a module has another entry than the slot's; takes it over
  static std::shared_ptr<PyUnit> make(const std::string& name, const std::vector<SlotDescription>& slots,
                                      const FullyShardOptions& options,
                                      const std::vector<std::pair<std::shared_ptr<PyUnit>, std::vector<std::string>>>& children,
                                      int members, const py::object& wrap, const py::object& adopt);

  [[nodiscard]] const fsdp::UnitHandle& handle() const { return handle_; }

  /// The unit's phases around a call of member `member`: (args, kwargs) after casts, or None where nothing was cast.
  py::object enter(int member, const py::tuple& args, const py::dict& kwargs);
  /// The result after casts.
  py::object leave(int member, const py::object& result);
  /// The call has thrown.
  void abandon(int member, bool stopped_early);
  /// Abandons forwards of any unit on this thread that have ended without a word: torch calls no hook for a KeyboardInterrupt.
  static void abandon_lost();
  /// Hooks for torch.nn.Module.register_forward_pre_hook (with_kwargs) and register_forward_hook (always_call).
  [[nodiscard]] py::object pre_hook(int member);
  [[nodiscard]] py::object post_hook(int member);

  [[nodiscard]] std::size_t size() const { return slots_.size(); }
  [[nodiscard]] py::object sharded(std::size_t slot) const { return slots_.at(slot).sharded.object(); }
  [[nodiscard]] py::object parameter(std::size_t slot) const;
  [[nodiscard]] py::object gathered(std::size_t slot) const { return slots_.at(slot).gathered.object(); }
  /// Makes `parameter` the slot's DTensor, everywhere.
  void replace(std::size_t slot, const py::object& parameter);
  /// The modules have the gathered parameters registered.
  [[nodiscard]] bool shows_gathered() const { return shown_; }
  /// Takes over what modules have registered in the place of leaves; see FrontEnd::follow.
  void follow();

 private:
  struct Open {
    std::unique_ptr<fsdp::ForwardScope> scope;
    Ref handled;  ///< the exception that was being handled when the forward began
    Ref frame;    ///< the Python frame that runs the forward
    std::uint64_t id = 0;
  };
  void show(bool gathered);
  [[nodiscard]] Open take(int member);

  fsdp::UnitHandle handle_;
  std::vector<Slot> slots_;
  Ref adopt_;
  std::vector<std::vector<Open>> open_;  // by member
  bool shown_ = false;
  bool following_ = false;
  bool inner_ = false;  ///< below another unit
};

}  // namespace hyper_parallel::python

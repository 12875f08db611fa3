// SPDX-License-Identifier: Apache-2.0
// CUDA kernels for the operators of torch that compute on the CPU, on the memory of `runtime.cpp`.
//
// Each refuses first what CUDA refuses: tensors of several devices, a generator of the CPU. The dispatcher, autograd and
// autocast above, and the allocator and the generators below, are those of torch's CUDA build.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using Names = std::unordered_set<std::string>;

extern "C" void simulated_cuda_waited(const char* kind, const char* operation);

namespace {

// The CPU's view of the memory of a tensor on the device
Tensor on_host(const Tensor& tensor) {
    auto keep = tensor.storage();
    auto view = at::from_blob(
        tensor.data_ptr(), tensor.sizes(), tensor.strides(), [keep](void*) {}, tensor.options().device(at::kCPU));
    if (tensor.is_conj()) view._set_conj(true);
    if (tensor.is_neg()) view._set_neg(true);
    return view;
}

void copy_contents(const Tensor& from, const Tensor& to) {  // from the CPU to the device
    if (from.numel() == 0) return;
    on_host(to).copy_(from);
}

Tensor to_device(const Tensor& tensor, c10::Device device) {
    auto moved = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
    copy_contents(tensor, moved);
    return moved;
}

// One call of an operator: its tensors on the device, and what stands for them on the CPU
class Call {
public:
    Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
        : op_(op), schema_(op.schema()), stack_(stack), first_(stack.size() - schema_.arguments().size()) {
        for (size_t i = 0; i < num_arguments(); i++) {
            each_tensor(argument(i), [&](const Tensor& tensor) { check_device(tensor); });
            if (!device_ && argument(i).isDevice() && argument(i).toDevice().is_cuda()) device_ = argument(i).toDevice();
        }
        if (!device_) device_ = c10::impl::VirtualGuardImpl(at::kCUDA).getDevice();
    }

    void run() {
        report_waits();
        for (size_t i = 0; i < num_arguments(); i++) replace(argument(i), schema_.arguments()[i]);
        op_.callBoxed(&stack_);
        for (auto& pair : pairs_) write_back(pair);
        for (size_t i = stack_.size() - schema_.returns().size(); i < stack_.size(); i++) restore(stack_[i]);
    }

private:
    struct Pair {
        Tensor device, host;
        bool is_written;
    };

    const std::string& name() const { return schema_.name(); }
    size_t num_arguments() const { return schema_.arguments().size(); }
    IValue& argument(size_t i) { return stack_[first_ + i]; }

    template <typename Function>
    static void each_tensor(const IValue& value, Function function) {
        if (value.isTensor()) {
            function(value.toTensor());
        } else if (value.isList()) {
            for (const IValue& element : value.toListRef()) each_tensor(element, function);
        }
    }

    void check_device(const Tensor& tensor) {
        if (!tensor.defined() || !tensor.is_cuda()) return;
        if (device_ && *device_ != tensor.device()) refuse(tensor.device());
        device_ = tensor.device();
    }

    [[noreturn]] void refuse(c10::Device other) {
        C10_THROW_ERROR(
            Error, "Expected all tensors to be on the same device, but found at least two devices, " + device_->str() +
                       " and " + other.str() + "! (simulated CUDA, " + name() + ")");
    }

    // Indexing moves indices itself, and a number in a tensor without dimensions is passed to the kernel, except as index
    bool may_be_on_cpu(const Tensor& tensor, const std::string& argument) const {
        if (argument == "indices") return name().find("index") != std::string::npos;
        return name() == "aten::_foreach_copy_" || (tensor.dim() == 0 && argument != "index");
    }

    void report_waits() {
        static const Names sized_by_values{"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
                                           "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount",
                                           "aten::repeat_interleave"};
        const char* operation = name().c_str();
        if (name() == "aten::_local_scalar_dense" || name() == "aten::equal") simulated_cuda_waited("value", operation);
        if (sized_by_values.count(name())) simulated_cuda_waited("size of the result", operation);
        for (size_t i = 0; i < num_arguments(); i++) {
            if (schema_.arguments()[i].name() != "indices") continue;
            // A number written where a mask is true takes no indices
            const bool is_fill = i + 1 < num_arguments() && argument(i + 1).isTensor() &&
                                 argument(i + 1).toTensor().numel() == 1 && argument(i + 1).toTensor().is_cpu();
            each_tensor(argument(i), [&](const Tensor& index) {
                if (!index.defined()) return;
                const bool is_mask = index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
                if (index.is_cpu()) simulated_cuda_waited("to the device", operation);
                else if (is_mask && !is_fill) simulated_cuda_waited("size of the result", operation);
            });
        }
    }

    Tensor stand_in(const Tensor& tensor, const c10::Argument& argument) {
        if (!tensor.defined()) return tensor;
        if (!tensor.is_cuda()) {
            if (tensor.is_cpu() && !may_be_on_cpu(tensor, argument.name())) refuse(tensor.device());
            return tensor;
        }
        const bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
        for (auto& pair : pairs_) {
            if (!pair.device.is_same(tensor)) continue;
            pair.is_written |= is_written;
            return pair.host;
        }
        // What is empty and written gets a size, which memory of another cannot have
        const bool is_fresh = is_written && tensor.numel() == 0;
        auto host = is_fresh ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU)) : on_host(tensor);
        pairs_.push_back({tensor, host, is_written});
        return host;
    }

    void replace(IValue& value, const c10::Argument& argument) {
        if (argument.type()->str().find("Generator") != std::string::npos) {
            value = host_generator(value);
        } else if (value.isTensor()) {
            value = stand_in(value.toTensor(), argument);
        } else if (value.isTensorList()) {
            c10::List<Tensor> replaced;
            for (const Tensor& tensor : value.toTensorVector()) replaced.push_back(stand_in(tensor, argument));
            value = replaced;
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> replaced;
            for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
                replaced.push_back(tensor ? std::optional<Tensor>(stand_in(*tensor, argument)) : std::nullopt);
            value = replaced;
        } else if (value.isDevice()) {
            value = c10::Device(at::kCPU);
        }
    }

    // Random numbers follow from the seed and the offset of the device's generator, which moves on
    at::Generator host_generator(const IValue& value) {
        auto generator = value.isNone() ? at::globalContext().defaultGenerator(*device_) : value.toGenerator();
        TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
                    generator.device().str(), "' (simulated CUDA, ", name(), ")");
        std::lock_guard<std::mutex> guard(generator.mutex());
        const uint64_t offset = generator.get_offset();
        generator.set_offset(offset + 4);  // Philox counts in fours
        return at::make_generator<at::CPUGeneratorImpl>(generator.current_seed() + 0x9e3779b97f4a7c15 * (offset + 1));
    }

    void write_back(Pair& pair) {
        const bool is_in_place = pair.host.numel() == 0 || pair.host.data_ptr() == pair.device.data_ptr();
        if (!pair.is_written || (is_in_place && pair.host.sizes() == pair.device.sizes())) return;
        pair.device.resize_(pair.host.sizes());
        if (is_in_place) return;
        pair.device.unsafeGetTensorImpl()->set_sizes_and_strides(pair.host.sizes(), pair.host.strides());
        copy_contents(pair.host, pair.device);
    }

    Tensor original(const Tensor& tensor) {
        if (!tensor.defined() || !tensor.is_cpu()) return tensor;
        for (const auto& pair : pairs_)
            if (pair.host.is_same(tensor)) return pair.device;
        return to_device(tensor, *device_);
    }

    void restore(IValue& value) {
        if (value.isTensor()) {
            value = original(value.toTensor());
        } else if (value.isTensorList()) {
            c10::List<Tensor> restored;
            for (const Tensor& tensor : value.toTensorVector()) restored.push_back(original(tensor));
            value = restored;
        }
    }

    const c10::OperatorHandle& op_;
    const c10::FunctionSchema& schema_;
    torch::jit::Stack& stack_;
    const size_t first_;
    std::optional<c10::Device> device_;
    std::vector<Pair> pairs_;
};

void simulate(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset);
    Call(op, *stack).run();
}

// Between host and device, and between devices. Only pinned memory is copied while the host goes on.
Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
    c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset);
    if (self.is_cuda() != source.is_cuda() && source.numel() > 0) {
        const Tensor& on_cpu = self.is_cuda() ? source : self;
        if (!non_blocking || !on_cpu.is_pinned())
            simulated_cuda_waited(self.is_cuda() ? "to the device" : "to the CPU", "aten::copy_");
    }
    const auto target = self.is_cuda() ? on_host(self) : self;
    target.copy_(source.is_cuda() ? on_host(source) : source);
    return self;
}

// ---- Operators that have a kernel of CUDA and none of the CPU ----

// y = w x / rms(x): with n = x / rms(x), dx = (w g - n mean(w g n)) / rms(x) and dw = sum(g n)
std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad, const Tensor& input, at::IntArrayRef shape, const Tensor& rstd,
    const std::optional<Tensor>& weight, std::array<bool, 2> wanted) {
    const bool has_weight = weight.has_value() && weight->defined();
    const int64_t num_outer = input.dim() - static_cast<int64_t>(shape.size());
    std::vector<int64_t> normed_dims, outer_dims;
    for (int64_t dim = 0; dim < input.dim(); dim++) (dim < num_outer ? outer_dims : normed_dims).push_back(dim);
    const auto g = grad.to(at::kFloat), r = rstd.to(at::kFloat), n = input.to(at::kFloat) * r;
    Tensor grad_input, grad_weight;
    if (wanted[0]) {
        const auto wg = has_weight ? g * weight->to(at::kFloat) : g;
        grad_input = (r * (wg - n * (wg * n).mean(normed_dims, /*keepdim=*/true))).to(input.scalar_type());
    }
    if (wanted[1] && has_weight) {
        const auto gn = g * n;
        grad_weight = (outer_dims.empty() ? gn : gn.sum(outer_dims)).to(weight->scalar_type());
    }
    return {grad_input, grad_weight};
}

// Products whose result has another dtype than the factors
Tensor product(const Tensor& a, const Tensor& b, at::ScalarType dtype) {
    return at::mm(a.to(at::kFloat), b.to(at::kFloat)).to(dtype);
}
Tensor& product_out(const Tensor& a, const Tensor& b, at::ScalarType dtype, Tensor& out) {
    return out.copy_(product(a, b, dtype));
}
Tensor sum_and_product(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType dtype,
                       const at::Scalar& beta, const at::Scalar& alpha) {
    return at::addmm(self.to(at::kFloat), a.to(at::kFloat), b.to(at::kFloat), beta, alpha).to(dtype);
}
Tensor& sum_and_product_out(const Tensor& self, const Tensor& a, const Tensor& b, at::ScalarType dtype,
                            const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
    return out.copy_(sum_and_product(self, a, b, dtype, beta, alpha));
}

// Attention of the fused kernels, which torch chooses by its own conditions: the plain formula, in float32
struct Attention {
    Tensor q, k, v, probabilities, log_sum;  // float32; keys and values have a head for each of the queries
    double scale;

    Attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, double dropout,
              bool is_causal, std::optional<double> given_scale)
        : scale(given_scale.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))))) {
        TORCH_CHECK(dropout == 0, "The simulated attention has no dropout.");
        q = query.to(at::kFloat);
        k = key.to(at::kFloat).repeat_interleave(query.size(1) / key.size(1), 1);
        v = value.to(at::kFloat).repeat_interleave(query.size(1) / value.size(1), 1);
        auto scores = at::matmul(q, k.transpose(-2, -1)) * scale;  // (B, heads, queries, keys)
        if (bias.defined()) scores = scores + bias.to(at::kFloat);
        if (is_causal) scores.masked_fill_(at::ones_like(scores, at::kBool).triu(1), -INFINITY);
        log_sum = at::logsumexp(scores, -1);  // (B, heads, queries)
        const auto is_empty = at::isneginf(log_sum).unsqueeze(-1);  // a query that sees no key
        probabilities = (scores - log_sum.unsqueeze(-1)).exp().masked_fill(is_empty, 0);
    }

    Tensor output(at::ScalarType dtype) const {  // its memory is (B, queries, heads, E)
        return at::matmul(probabilities, v).to(dtype).transpose(1, 2).contiguous().transpose(1, 2);
    }

    // Of query, key, value and bias
    std::array<Tensor, 4> backward(const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value,
                                   const Tensor& bias) const {
        const auto g = grad.to(at::kFloat), by_probability = at::matmul(g, v.transpose(-2, -1));
        const auto mean = (by_probability * probabilities).sum(-1, /*keepdim=*/true);
        const auto by_score = probabilities * (by_probability - mean);
        const auto of_group = [](const Tensor& gradient, const Tensor& like) {
            const auto groups = gradient.unflatten(1, {like.size(1), gradient.size(1) / like.size(1)});
            return groups.sum(2).to(like.scalar_type());
        };
        return {
            (at::matmul(by_score, k) * scale).to(query.scalar_type()),
            of_group(at::matmul(by_score.transpose(-2, -1), q) * scale, key),
            of_group(at::matmul(probabilities.transpose(-2, -1), g), value),
            bias.defined() ? by_score.sum_to_size(bias.sizes()).to(bias.scalar_type()) : Tensor(),
        };
    }
};

using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

Tensor no_seed(const Tensor& like) { return at::zeros({2}, like.options().dtype(at::kLong)); }

Outputs outputs_of(const Attention& attention, const Tensor& query, const Tensor& key) {
    const auto none = Tensor();
    return {attention.output(query.scalar_type()), attention.log_sum, none, none, query.size(2), key.size(2),
            no_seed(query), no_seed(query), none};
}

Outputs flash(const Tensor& query, const Tensor& key, const Tensor& value, double dropout, bool is_causal, bool,
              std::optional<double> scale) {
    return outputs_of(Attention(query, key, value, {}, dropout, is_causal, scale), query, key);
}
Gradients flash_backward(const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor&,
                         const Tensor&, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout,
                         bool is_causal, const Tensor&, const Tensor&, std::optional<double> scale) {
    const Attention attention(query, key, value, {}, dropout, is_causal, scale);
    const auto found = attention.backward(grad, query, key, value, {});
    return {found[0], found[1], found[2]};
}

Outputs cudnn(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& bias, bool,
              double dropout, bool is_causal, bool, std::optional<double> scale) {
    return outputs_of(Attention(query, key, value, bias.value_or(Tensor()), dropout, is_causal, scale), query, key);
}
Gradients cudnn_backward(const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor&,
                         const Tensor&, const Tensor&, const Tensor&, const Tensor& bias, const Tensor&, const Tensor&,
                         c10::SymInt, c10::SymInt, double dropout, bool is_causal, std::optional<double> scale) {
    const Attention attention(query, key, value, bias, dropout, is_causal, scale);
    const auto found = attention.backward(grad, query, key, value, bias);
    return {found[0], found[1], found[2]};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& bias, bool, double dropout,
    bool is_causal, std::optional<double> scale) {
    const Attention attention(query, key, value, bias.value_or(Tensor()), dropout, is_causal, scale);
    return {attention.output(query.scalar_type()), attention.log_sum, no_seed(query), no_seed(query)};
}
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, const Tensor&,
    const Tensor&, const Tensor&, const Tensor&, double dropout, std::array<bool, 4> wanted, bool is_causal,
    std::optional<double> scale) {
    const Attention attention(query, key, value, bias, dropout, is_causal, scale);
    auto found = attention.backward(grad, query, key, value, bias);
    for (size_t i = 0; i < wanted.size(); i++)
        if (!wanted[i]) found[i] = Tensor();
    return {found[0], found[1], found[2], found[3]};
}

// ---- Registration ----

bool returns_view(const c10::FunctionSchema& schema) {
    for (const auto& value : schema.returns())
        if (value.alias_info() && !value.alias_info()->isWrite()) return true;
    return false;
}

class Silence : public c10::WarningHandler {  // torch warns once when a kernel is replaced
    void process(const c10::Warning&) override {}
};

struct Registration {
    torch::Library library{torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__};

    Registration() {
        // torch's own: they look at memory, or get it
        static const Names kept{"aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::is_set_to",
                                "aten::record_stream", "aten::is_pinned", "aten::_pin_memory", "aten::view",
                                "aten::as_strided", "aten::_reshape_alias", "aten::unfold", "aten::_efficientzerotensor",
                                "aten::_has_same_storage_numel"};
        // Without a kernel of CUDA themselves: they would choose cuDNN
        static const Names added{"aten::convolution", "aten::convolution_backward"};
        static const Names own{"copy_",
                               "_fused_rms_norm_backward",
                               "mm.dtype",
                               "mm.dtype_out",
                               "addmm.dtype",
                               "addmm.dtype_out",
                               "_scaled_dot_product_flash_attention",
                               "_scaled_dot_product_flash_attention_backward",
                               "_scaled_dot_product_cudnn_attention",
                               "_scaled_dot_product_cudnn_attention_backward",
                               "_scaled_dot_product_efficient_attention",
                               "_scaled_dot_product_efficient_attention_backward"};
        Silence silence;
        c10::WarningUtils::WarningHandlerGuard guard(&silence);
        auto& dispatcher = c10::Dispatcher::singleton();
        for (const auto& name : dispatcher.getAllOpNames()) {
            const auto op = dispatcher.findSchema(name);
            if (!op || name.name.rfind("aten::", 0) != 0 || kept.count(name.name) || returns_view(op->schema())) continue;
            if (!op->hasKernelForDispatchKey(DispatchKey::CUDA) && !added.count(name.name)) continue;
            const auto text = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
            if (own.count(text)) continue;
            library.impl(text.c_str(), torch::CppFunction::makeFromBoxedFunction<&simulate>());
        }
        library.impl("copy_", TORCH_FN(copy));
        library.impl("_fused_rms_norm_backward", TORCH_FN(rms_norm_backward));
        library.impl("mm.dtype", TORCH_FN(product));
        library.impl("mm.dtype_out", TORCH_FN(product_out));
        library.impl("addmm.dtype", TORCH_FN(sum_and_product));
        library.impl("addmm.dtype_out", TORCH_FN(sum_and_product_out));
        library.impl("_scaled_dot_product_flash_attention", TORCH_FN(flash));
        library.impl("_scaled_dot_product_flash_attention_backward", TORCH_FN(flash_backward));
        library.impl("_scaled_dot_product_cudnn_attention", TORCH_FN(cudnn));
        library.impl("_scaled_dot_product_cudnn_attention_backward", TORCH_FN(cudnn_backward));
        library.impl("_scaled_dot_product_efficient_attention", TORCH_FN(efficient));
        library.impl("_scaled_dot_product_efficient_attention_backward", TORCH_FN(efficient_backward));
    }
} registration;

}  // namespace

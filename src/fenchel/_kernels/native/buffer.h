// Scratch memory. Not std::vector: its functions, compiled for one instruction set, could be linked
// into the code of another.

template <class T>
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { std::free(data_); }

    // Room for n numbers and one vector more; what was there is lost.
    T* reserve(std::int64_t n) {
        if (n > size_) {
            std::free(data_);
            data_ = static_cast<T*>(std::aligned_alloc(64, (n * sizeof(T) + 255) / 64 * 64));
            size_ = data_ ? n : 0;
            if (!data_) throw std::bad_alloc();
        }
        return data_;
    }
    T* get() const { return data_; }

  private:
    T* data_ = nullptr;
    std::int64_t size_ = 0;
};

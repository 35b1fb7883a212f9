// Scratch memory. Not std::vector: its functions, compiled for one instruction set, could be linked
// into the code of another.

// What a thread gave back is kept for its next call: fresh pages cost more than a short attention.
class Spare {
  public:
    ~Spare() {
        for (Piece& piece : pieces_) std::free(piece.data);
    }
    // At least this many bytes, and how many they are; null where there is no such piece.
    void* take(std::size_t& bytes) {
        Piece* best = nullptr;
        for (Piece& piece : pieces_)
            if (piece.data && piece.bytes >= bytes && (!best || piece.bytes < best->bytes)) best = &piece;
        if (!best || best->bytes > 4 * bytes + kSmall) return nullptr;
        void* data = best->data;
        bytes = best->bytes;
        total_ -= bytes;
        *best = Piece();
        return data;
    }
    void give(void* data, std::size_t bytes) {
        for (Piece& piece : pieces_)
            if (!piece.data && total_ + bytes <= kMost) {
                piece = {data, bytes};
                total_ += bytes;
                return;
            }
        std::free(data);
    }

  private:
    static constexpr std::size_t kMost = 8 << 20, kSmall = 64 << 10;  // bytes of a thread; that fit every request
    struct Piece {
        void* data = nullptr;
        std::size_t bytes = 0;
    };
    Piece pieces_[24];
    std::size_t total_ = 0;
};

inline Spare& spare() {
    static thread_local Spare of_thread;
    return of_thread;
}

template <class T>
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { release(); }

    // Room for n numbers and one vector more; what was there is lost.
    T* reserve(std::int64_t n) {
        if (n > size_) {
            release();
            bytes_ = (n * sizeof(T) + 255) / 64 * 64;
            data_ = static_cast<T*>(spare().take(bytes_));
            if (!data_) data_ = static_cast<T*>(std::aligned_alloc(64, bytes_));
            if (!data_) throw std::bad_alloc();
            size_ = std::int64_t(bytes_ - 192) / std::int64_t(sizeof(T));
        }
        return data_;
    }
    T* get() const { return data_; }

  private:
    void release() {
        if (data_) spare().give(data_, bytes_);
        data_ = nullptr;
        size_ = 0;
    }
    T* data_ = nullptr;
    std::int64_t size_ = 0;
    std::size_t bytes_ = 0;
};

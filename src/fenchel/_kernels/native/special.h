// Functions of vectors of doubles that quadrature and mixtures need, a few units in the last place off.

// c[0] + c[1] x + ..., as chains in x^4 that run side by side.
template <int N>
__attribute__((always_inline)) inline Vec<double> polynomial(const double (&c)[N], Vec<double> x) {
    const Vec<double> square = x * x, fourth = square * square;
    Vec<double> chain[4];
    for (int j = 0; j < 4; ++j) {
        constexpr int last = N - 1;
        int k = last - (last - j) % 4;
        chain[j] = fill<double>(c[k]);
        for (k -= 4; k >= 0; k -= 4) chain[j] = chain[j] * fourth + c[k];
    }
    return (chain[3] * x + chain[2]) * square + (chain[1] * x + chain[0]);
}

// Taylor's polynomials, for |angle| <= pi / 2.
__attribute__((always_inline)) inline Vec<double> sine(Vec<double> angle) {
    static constexpr double c[] = {
        1.0, -1.6666666666666667e-1, 8.3333333333333333e-3, -1.9841269841269841e-4,
        2.7557319223985891e-6, -2.5052108385441719e-8, 1.6059043836821615e-10, -7.6471637318198165e-13,
        2.8114572543455208e-15, -8.2206352466243297e-18, 1.9572941063391261e-20};
    return angle * polynomial(c, angle * angle);
}
__attribute__((always_inline)) inline Vec<double> cosine(Vec<double> angle) {
    static constexpr double c[] = {
        1.0, -0.5, 4.1666666666666667e-2, -1.3888888888888889e-3, 2.4801587301587302e-5,
        -2.7557319223985891e-7, 2.0876756987868099e-9, -1.1470745597729725e-11, 4.7794773323873853e-14,
        -1.5619206968586226e-16, 4.1103176233121649e-19, -8.8967913924505733e-22};
    return polynomial(c, angle * angle);
}

// The mass of a standard normal beyond z >= 0, from exp(-z^2 / 2): a polynomial in (x - k) / (x + k),
// x = z / sqrt 2, after Shepherd and Laframboise (1981); coefficients fitted to 50 digits.
__attribute__((always_inline)) inline Vec<double> tail(Vec<double> z, Vec<double> bell) {
    static constexpr double c[] = {
        0.618756315418913764, -0.0701202992927726281, 0.00179270774273951282, 0.0411383692449975313,
        -0.0544019650712223064, 0.0461521605821406249, -0.0293466992883246692, 0.0141811386860555694,
        -0.00487328984163263112, 0.000877813082598532536, 0.000146857189022479015, -0.000145077676230388277,
        0.0000258232648708870806, 0.0000111937828574559083, -5.71902401667344678e-6, -4.89631285365176102e-7,
        8.70991079311240796e-7, -2.5422326893436511e-8, -1.24285631240083714e-7, 9.39541161185024063e-9,
        1.59896333583340215e-8, -9.77567943449280827e-10, -1.31155367356673788e-9};
    constexpr double kFar = 1e30;  // where the bell is zero, and the product below does not overflow
    const Vec<double> x = (z < kFar ? z : fill<double>(kFar)) * M_SQRT1_2;
    const Vec<double> above = x + 3.75, twice = x + x + 1.0, inverse = 1.0 / (above * twice);
    return bell * polynomial(c, (x - 3.75) * twice * inverse) * above * inverse;
}

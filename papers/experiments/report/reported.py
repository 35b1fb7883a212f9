"""What the papers themselves report, typed from them. CLAIMS D-Tab1, D-Tab2, F-Tab6.2 to 6.4"""

from __future__ import annotations

from benchmarks.tables import Listing

VIT = (
    Listing(
        "The paper reports (its Table 2): test accuracy in per cent, 3.2 M parameters",
        ("", "Fashion-MNIST", "CIFAR-10", "CIFAR-100"),
        (
            ("ViT", "92.8 ± 1", "75.1 ± 1", "46.3 ± 1"),
            ("OT-ViT", "93.7 ± 1", "77.2 ± 2", "49.1 ± 1"),
        ),
    ),
    Listing(
        "The paper reports (its Table 1): test accuracy on CIFAR-100 in per cent, by rate",
        ("", "0.003", "0.0003", "3e-05"),
        (
            ("ViT", "22.8 ± 1", "46.3 ± 1", "45.2 ± 1"),
            ("OT-ViT", "17.5 ± 1", "49.1 ± 1", "41.2 ± 1"),
        ),
    ),
)

VQA = (
    Listing(
        "The thesis reports (its Tables 6.2, 6.3): accuracy in per cent on VQA-v2, test-standard",
        ("attention", "λ", "yes/no", "number", "other", "overall"),
        (
            ("discrete softmax", "–", "83.47", "42.99", "56.33", "66.13"),
            ("2D continuous softmax, N = 100", "–", "83.79", "44.33", "56.04", "66.27"),
            ("2D continuous softmax, N = 49", "–", "83.57", "43.70", "56.07", "66.12"),
            ("2D continuous sparsemax, N = 100", "–", "83.38", "43.91", "56.14", "66.10"),
            ("2D continuous sparsemax, N = 49", "–", "83.69", "43.00", "56.09", "66.10"),
            ("2-MCA, N = 100", "–", "83.59", "43.65", "56.24", "66.21"),
            ("4-MCA, N = 100", "–", "83.72", "43.47", "56.03", "66.14"),
            ("test-MCA, N = 100", "10", "83.76", "44.08", "56.00", "66.21"),
            ("test-MCA, N = 100", "100", "83.77", "44.28", "56.02", "66.25"),
            ("test-MCA, N = 100", "500", "83.79", "44.36", "56.04", "66.27"),
        ),
    ),
    Listing(
        "The thesis reports (its Table 6.4): per cent of questions with K* modes",
        ("λ", "K* = 1", "K* = 2", "K* = 3", "K* = 4", "K* = 5"),
        (
            ("10", "58.58", "20.81", "8.02", "6.77", "5.82"),
            ("100", "84.87", "11.22", "2.51", "1.00", "0.41"),
            ("500", "96.17", "3.30", "0.40", "0.10", "0.03"),
        ),
    ),
)

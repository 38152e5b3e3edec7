//! Mounts every case as a test of its own.

/// Mounts each case of the suite as a `#[test]` named `group::case`, against the
/// [`Factory`](crate::Factory) that the expression gives.
///
/// ```
/// # struct MyStoreFactory;
/// # #[leasehold_conformance::async_trait]
/// # impl leasehold_conformance::Factory for MyStoreFactory {
/// #     fn time(&self) -> leasehold_conformance::Time {
/// #         leasehold_conformance::Time::Virtual
/// #     }
/// #     async fn open(&self) -> Result<Box<dyn leasehold_conformance::Harness>, leasehold_api::Error> {
/// #         Err(leasehold_api::Error::closed())
/// #     }
/// # }
/// leasehold_conformance::suite!(MyStoreFactory);
/// ```
///
/// It also mounts `verdict::all_that_is_declared_can_be_tried`, which fails where the store declares what the harness has
/// no means to try, such as durable tokens without a child process: unproven is not green. And `child::entry`, the test that the suite starts again as a child process. To mount
/// it twice in one file, put each into a module of its own.
#[macro_export]
macro_rules! suite {
    ($factory:expr) => {
        fn leasehold_mount() -> $crate::Mount {
            $crate::Mount::new($factory, ::std::module_path!())
        }

        mod child {
            #[test]
            fn entry() {
                super::leasehold_mount().child_entry();
            }
        }

        mod verdict {
            #[test]
            fn all_that_is_declared_can_be_tried() {
                super::leasehold_mount().judge();
            }
        }

        $crate::for_each_case!($crate::mount_cases);
    };
}

/// For [`suite!`]: turns the list of cases into tests.
#[doc(hidden)]
#[macro_export]
macro_rules! mount_cases {
    ($( $group:ident { $( $case:ident [$($rule:ident)*] [$($need:ident)*]; )* } )*) => {
        $(
            mod $group {
                $(
                    #[test]
                    fn $case() {
                        super::leasehold_mount().run(concat!(stringify!($group), "::", stringify!($case)));
                    }
                )*
            }
        )*
    };
}
